"""Make small steps over frames: recurrent layers, and convolutions that cache their last frames in several ways."""

from __future__ import annotations

import torch
from timed_step import Step, frame_step
from torch import Tensor, nn
from txl_export import StateSpec

SEEN = 24
"""The number of features of a frame that the recurrent policies take."""


class Lstm(nn.Module):
    """LSTM layers, then a linear layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(SEEN, width, layers), nn.Linear(width, 6)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: x [B, 24] and two states [layers, B, width] → an output [B, 6] and the new states."""
        y, (h, c) = self.rnn(x[None], (h, c))
        return self.head(y[0]), h, c


class Gru(nn.Module):
    """GRU layers, then a linear layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(SEEN, width, layers), nn.Linear(width, 6)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: x [B, 24] and a state [layers, B, width] → an output [B, 6] and the new state."""
        y, h = self.rnn(x[None], h)
        return self.head(y[0]), h


def lstm(layers: int, width: int, batch: int) -> Step:
    """Make a step of a recurrent policy of LSTMs, as robots use them."""
    states = [StateSpec(name, (layers, "B", width)) for name in "hc"]
    return frame_step(Lstm(layers, width), SEEN, states, batch)


def gru(layers: int, width: int, batch: int) -> Step:
    """Make a step of a recurrent policy of GRUs, as robots use them."""
    return frame_step(Gru(layers, width), SEEN, [StateSpec("h", (layers, "B", width))], batch)


class Voice(nn.Module):
    """Two convolutions over a frame and the two frames before it, then an LSTM cell, then a mask of the frame."""

    def __init__(self, bins: int, channels: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(bins, channels, 3), nn.Conv1d(channels, channels, 3)
        self.cell, self.mask = nn.LSTMCell(channels, width), nn.Linear(width, bins)

    def forward(self, x: Tensor, seen: Tensor, found: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: x [B, bins], two caches [B, .., 2] and two states [B, width] → [B, bins] and the new states."""
        seen = torch.cat((seen, x[:, :, None]), 2)
        found = torch.cat((found, torch.relu(self.one(seen))), 2)
        h, c = self.cell(torch.relu(self.two(found))[:, :, 0], (h, c))
        return x * torch.sigmoid(self.mask(h)), seen[:, :, 1:], found[:, :, 1:], h, c


def voice() -> Step:
    """Make a step of a model that masks the noise beside a voice frame by frame, as DTLN, GTCRN and silero do."""
    caches = [StateSpec("seen", ("B", 129, 2)), StateSpec("found", ("B", 64, 2))]
    return frame_step(Voice(129, 64, 128), 129, [*caches, *(StateSpec(name, ("B", 128)) for name in "hc")])


class LayerSlices(nn.Module):
    """Convolutions over the last frames; the caches of all layers are one tensor, which is written layer by layer."""

    def __init__(self, layers: int, width: int, taps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, taps, groups=width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: x [B, width] and a cache [layers, B, width, taps] → an output [B, width] and the new cache.

        For example, x [1, 64] and a cache [6, 1, 64, 16].
        """
        cache = cache.clone()
        for place, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            window = torch.cat((cache[place, :, :, 1:], x[:, :, None]), 2)
            cache[place] = window
            x = x + torch.relu(mix(layer(window)[:, :, 0]))
        return x, cache


class NewestSlices(nn.Module):
    """The layers of `LayerSlices`, each with a cache of its own, which moves by one frame and gets the new one last."""

    def __init__(self, layers: int, width: int, taps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, taps, groups=width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: x [B, width] and four caches [B, width, taps] → an output [B, width] and the new caches.

        For example, x [1, 64] and caches [1, 64, 16].
        """
        caches = [torch.roll(cache, -1, 2) for cache in (a, b, c, d)]
        for cache, layer, mix in zip(caches, self.layers, self.mix, strict=True):
            cache[:, :, -1] = x
            x = x + torch.relu(mix(layer(cache)[:, :, 0]))
        return x, *caches


def layer_slices() -> Step:
    """Make a step of 6 convolutions that update their cache by `cache[layer] = new`."""
    return frame_step(LayerSlices(6, 64, 16), 64, [StateSpec("cache", (6, "B", 64, 16))])


def newest_slices() -> Step:
    """Make a step of 4 convolutions that update their caches by `cache[:, :, -1] = x`."""
    return frame_step(NewestSlices(4, 64, 16), 64, [StateSpec(name, ("B", 64, 16)) for name in "abcd"])


class RingTcn(nn.Module):
    """Dilated convolutions whose caches are rings: each frame overwrites the oldest frame."""

    taps: Tensor

    def __init__(self, width: int, dilations: tuple[int, ...], rows: int) -> None:
        super().__init__()
        self.dilations, self.rows = dilations, rows
        self.layers = nn.ModuleList(nn.Linear(3 * width, width) for _ in dilations)
        self.register_buffer("taps", torch.tensor([2, 1, 0]))

    def forward(self, x: Tensor, cache: Tensor, place: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: x [B, width], a cache [layers, B, rows, width] and write places, int64 [B] → an output
        [B, width] and the new states. For example, x [2, 64], a cache [4, 2, 17, 64] and places [3, 9].
        """
        batch, width = x.shape
        caches = []
        for ring, dilation, layer in zip(cache.unbind(0), self.dilations, self.layers, strict=True):
            ring = ring.scatter(1, place[:, None, None].expand(batch, 1, width), x[:, None])
            read = (place[:, None] - dilation * self.taps) % self.rows
            seen = ring.gather(1, read[:, :, None].expand(batch, 3, width))
            x = x + torch.relu(layer(seen.flatten(1)))
            caches.append(ring)
        return x, torch.stack(caches), (place + 1) % self.rows


def ring_tcn() -> Step:
    """Make a step of a temporal convolutional network of 4 layers; each sequence has its own place in the ring."""
    states = [StateSpec("cache", (4, "B", 17, 64)), StateSpec("place", ("B",), dtype="int64")]
    return frame_step(RingTcn(64, (1, 2, 4, 8), 17), 64, states)
