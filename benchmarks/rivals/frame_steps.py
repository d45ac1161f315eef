"""Small steps over frames: recurrent layers, convolutions with their last frames, caches that are written by slices."""

from __future__ import annotations

import torch
from timed_step import Step, frame_step
from torch import Tensor, nn
from txl_export import StateSpec

SEEN = 24
"""Number of features in a frame of the recurrent policies."""


class Lstm(nn.Module):
    """LSTM layers, then a linear layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(SEEN, width, layers), nn.Linear(width, 6)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: [B, features] and two states [layers, B, width] → [B, 6] and the states."""
        y, (h, c) = self.rnn(x[None], (h, c))
        return self.head(y[0]), h, c


class Gru(nn.Module):
    """GRU layers, then a linear layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(SEEN, width, layers), nn.Linear(width, 6)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: [B, features] and a state [layers, B, width] → [B, 6] and the state."""
        y, h = self.rnn(x[None], h)
        return self.head(y[0]), h


def lstm(layers: int, width: int, batch: int) -> Step:
    """Make a recurrent policy as robots use it, with LSTMs."""
    states = [StateSpec(name, (layers, "B", width)) for name in "hc"]
    return frame_step(Lstm(layers, width), SEEN, states, batch)


def gru(layers: int, width: int, batch: int) -> Step:
    """Make a recurrent policy as robots use it, with GRUs."""
    return frame_step(Gru(layers, width), SEEN, [StateSpec("h", (layers, "B", width))], batch)


class Voice(nn.Module):
    """Two convolutions over this frame and the last ones, an LSTM cell, and a mask."""

    def __init__(self, bins: int, channels: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(bins, channels, 3), nn.Conv1d(channels, channels, 3)
        self.cell, self.mask = nn.LSTMCell(channels, width), nn.Linear(width, bins)

    def forward(self, x: Tensor, seen: Tensor, found: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: [B, bins], two caches [B, channels, 2] and two states [B, width] → [B, bins] and the states."""
        seen = torch.cat((seen, x[:, :, None]), 2)
        found = torch.cat((found, torch.relu(self.one(seen))), 2)
        h, c = self.cell(torch.relu(self.two(found))[:, :, 0], (h, c))
        return x * torch.sigmoid(self.mask(h)), seen[:, :, 1:], found[:, :, 1:], h, c


def voice() -> Step:
    """Make a model that masks a voice's noise frame by frame, as DTLN, GTCRN and silero do."""
    caches = [StateSpec("seen", ("B", 129, 2)), StateSpec("found", ("B", 64, 2))]
    return frame_step(Voice(129, 64, 128), 129, [*caches, *(StateSpec(name, ("B", 128)) for name in "hc")])


class LayerSlices(nn.Module):
    """Convolutions over the last frames; their caches are parts of one tensor, written layer by layer."""

    def __init__(self, layers: int, width: int, taps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, taps, groups=width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: [B, width] and a cache [layers, B, width, taps] → [B, width] and the cache.

        For example, [1, 64] and [6, 1, 64, 3].
        """
        cache = cache.clone()
        for place, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            window = torch.cat((cache[place, :, :, 1:], x[:, :, None]), 2)
            cache[place] = window
            x = x + torch.relu(mix(layer(window)[:, :, 0]))
        return x, cache


class NewestSlices(nn.Module):
    """The same layers, each with a cache of its own, which moves by one frame and gets the new frame at its end."""

    def __init__(self, layers: int, width: int, taps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, taps, groups=width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: [B, width] and four caches [B, width, taps] → [B, width] and the caches, e.g. [1, 64] and
        [1, 64, 3].
        """
        caches = [torch.roll(cache, -1, 2) for cache in (a, b, c, d)]
        for cache, layer, mix in zip(caches, self.layers, self.mix, strict=True):
            cache[:, :, -1] = x
            x = x + torch.relu(mix(layer(cache)[:, :, 0]))
        return x, *caches


def layer_slices() -> Step:
    """Make a step of 6 layers that writes `cache[layer] = new`."""
    return frame_step(LayerSlices(6, 64, 16), 64, [StateSpec("cache", (6, "B", 64, 16))])


def newest_slices() -> Step:
    """Make a step of 4 layers that writes `cache[:, :, -1] = x`."""
    return frame_step(NewestSlices(4, 64, 16), 64, [StateSpec(name, ("B", 64, 16)) for name in "abcd"])


class RingTcn(nn.Module):
    """Dilated convolutions whose caches are rings: each frame overwrites the oldest one."""

    taps: Tensor

    def __init__(self, width: int, dilations: tuple[int, ...], rows: int) -> None:
        super().__init__()
        self.dilations, self.rows = dilations, rows
        self.layers = nn.ModuleList(nn.Linear(3 * width, width) for _ in dilations)
        self.register_buffer("taps", torch.tensor([2, 1, 0]))

    def forward(self, x: Tensor, cache: Tensor, place: Tensor) -> tuple[Tensor, ...]:
        """Run a frame: [B, width], a cache [layers, B, rows, width] and places int64 [B] → [B, width] and the states.

        For example, [2, 64], [4, 2, 16, 64] and [3, 9].
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
    """Make a temporal convolutional network of 4 layers; each sequence has its own place in the ring."""
    states = [StateSpec("cache", (4, "B", 17, 64)), StateSpec("place", ("B",), dtype="int64")]
    return frame_step(RingTcn(64, (1, 2, 4, 8), 17), 64, states)
