"""Make steps of token mixers: windowed attention, retention, RWKV's average, the delta rule, a block of Zipformer."""

from __future__ import annotations

import torch
from timed_step import Step, frame_step
from torch import Tensor, nn
from txl_export import InputSpec, StateSpec, StepSpec


class LlamaLayer(nn.Module):
    """Attention with grouped heads and rotary positions, then gated linear layers."""

    turns: Tensor

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, shared * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.register_buffer("turns", 10000.0 ** (-torch.arange(0, self.size, 2) / self.size))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a token: x [B, width], two windows [B, shared heads, rows, size] and positions, int64 [B] → an output
        [B, width] and both windows with a new row. For example, x [1, 256], windows [1, 2, 64, 32] and positions [17].
        """
        batch, rows = len(x), keys.shape[2]
        angle = place[:, None, None] * self.turns
        normed = self.norms[0](x)
        query = self._turned(self.query(normed).view(batch, self.heads, self.size), angle)
        key = self._turned(self.key(normed).view(batch, self.shared, self.size), angle)
        keys = torch.cat((keys[:, :, 1:], key[:, :, None]), 2)
        values = torch.cat((values[:, :, 1:], self.value(normed).view(batch, self.shared, 1, self.size)), 2)
        grouped = query.view(batch, self.shared, self.heads // self.shared, self.size)
        visible = torch.arange(rows - 1, -1, -1) <= place[:, None]
        scores = (grouped @ keys.transpose(2, 3)) * self.size**-0.5
        scores = scores.masked_fill(~visible[:, None, None], -1e9)
        x = x + self.out((scores.softmax(-1) @ values).reshape(batch, -1))
        normed = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed)), keys, values

    def _turned(self, rows: Tensor, angle: Tensor) -> Tensor:
        one, other = rows.chunk(2, -1)
        return torch.cat((one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()), -1)


class Llama(nn.Module):
    """Two `LlamaLayer`s, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(width, 8, 2, 3 * width) for _ in range(2))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run a token: x [B, width], keys and values [layers, B, shared heads, rows, size] and positions, int64 [B] →
        an output [B, width] and the new states. For example, x [1, 256], keys [2, 1, 2, 64, 32] and positions [17].
        """
        kept = []
        for layer, key, value in zip(self.layers, keys.unbind(0), values.unbind(0), strict=True):
            x, *new = layer(x, key, value, place)
            kept.append(new)
        return x, torch.stack([key for key, _ in kept]), torch.stack([value for _, value in kept]), place + 1


def llama() -> Step:
    """Make a step of a Llama of 2 layers of width 256 with a window of 64 rows."""
    windows = [StateSpec(name, (2, "B", 2, 64, 32)) for name in ("keys", "values")]
    return frame_step(Llama(256), 256, [*windows, StateSpec("place", ("B",), dtype="int64")])


class RetNet(nn.Module):
    """Layers of retention in recurrent form: each head's matrix fades at each token, and the token adds to it."""

    fade: Tensor

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.mixes = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.groups = nn.ModuleList(nn.GroupNorm(heads, width) for _ in range(layers))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.register_buffer("fade", 1 - 2.0 ** (-5 - torch.arange(heads))[:, None, None])

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run a token: x [B, width] and a state [layers, B, heads, size, size] → an output [B, width] and the new
        state. For example, x [1, 128] and a state [2, 1, 4, 32, 32].
        """
        after = []
        for old, mix, out, norm, group, wide in zip(
            state.unbind(0), self.mixes, self.outs, self.norms, self.groups, self.wide, strict=True
        ):
            query, key, value, gate = mix(norm(x)).chunk(4, -1)
            query, key, value = (part.view(-1, self.heads, self.size) for part in (query, key, value))
            new = self.fade * old + key[..., :, None] * value[..., None, :] * self.size**-0.5
            results = (query[..., None, :] @ new).flatten(1)
            x = x + out(nn.functional.silu(gate) * group(results))
            x = x + wide(x)
            after.append(new)
        return x, torch.stack(after)


def retnet(width: int = 128, heads: int = 4, layers: int = 2) -> Step:
    """Make a step of a RetNet, by default 2 layers of width 128 with 4 heads."""
    states = [StateSpec("state", (layers, "B", heads, width // heads, width // heads))]
    return frame_step(RetNet(width, heads, layers), width, states)


class RwkvLayer(nn.Module):
    """Time mixing by a running average, kept stable by subtracting the largest exponent, and then channel mixing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix_key, self.mix_value, self.mix_gate, self.mix_in, self.mix_open = (
            nn.Parameter(torch.rand(width)) for _ in range(5)
        )
        self.first, self.decay = nn.Parameter(torch.randn(width)), nn.Parameter(-torch.rand(width))
        self.key, self.value, self.gate, self.out, self.open = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run a token: x [B, width] and a state [B, 5, width] → an output [B, width] and the new state."""
        before, before_wide, top, bottom, largest = state.unbind(1)
        now = self.norms[0](x)
        key, value, gate = (
            layer(torch.lerp(before, now, mix))
            for layer, mix in ((self.key, self.mix_key), (self.value, self.mix_value), (self.gate, self.mix_gate))
        )
        most = torch.maximum(largest, self.first + key)
        old, new = (largest - most).exp(), (self.first + key - most).exp()
        x = x + self.out(torch.sigmoid(gate) * (old * top + new * value) / (old * bottom + new))
        after = torch.maximum(largest + self.decay, key)
        old, new = (largest + self.decay - after).exp(), (key - after).exp()
        wide = self.norms[1](x)
        inner = torch.relu(self.wide(torch.lerp(before_wide, wide, self.mix_in))).square()
        x = x + torch.sigmoid(self.open(torch.lerp(before_wide, wide, self.mix_open))) * self.narrow(inner)
        return x, torch.stack((now, wide, old * top + new * value, old * bottom + new, after), 1)


class Rwkv(nn.Module):
    """`RwkvLayer`s, one after the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RwkvLayer(width) for _ in range(layers))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run a token: x [B, width] and a state [layers, B, 5, width] → an output [B, width] and the new state."""
        kept = []
        for layer, old in zip(self.layers, state.unbind(0), strict=True):
            x, new = layer(x, old)
            kept.append(new)
        return x, torch.stack(kept)


def rwkv(width: int = 128, layers: int = 2) -> Step:
    """Make a step of an RWKV of version 4, by default 2 layers of width 128."""
    first = torch.zeros(layers, 1, 5, width)
    first[:, :, 4] = -1e30
    return frame_step(Rwkv(width, layers), width, [StateSpec("state", (layers, "B", 5, width), initial=first)])


class DeltaLayer(nn.Module):
    """The gated delta rule in recurrent form, as in Qwen3-Next: a head's matrix fades, and learns what it lacks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mix, self.gates = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 2 * heads, bias=False)
        self.taps, self.rate = nn.Parameter(torch.randn(3 * width, 4) / 2), nn.Parameter(torch.rand(heads) * 2)
        self.bias, self.each = nn.Parameter(torch.randn(heads)), nn.RMSNorm(self.size)
        self.out = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, seen: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a token: x [B, width], a window [B, 3 · width, 3] and a state [B, heads, size, size] → an output
        [B, width], and the new window and state.
        """
        normed = self.norms[0](x)
        into, gate = self.mix(normed).split((3 * x.shape[-1], x.shape[-1]), -1)
        joined = torch.cat((seen, into[..., None]), -1)
        query, key, value = (
            nn.functional.silu((joined * self.taps).sum(-1)).view(-1, 3, self.heads, self.size).unbind(1)
        )
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        amount, fade = self.gates(normed).chunk(2, -1)
        fade = torch.exp(-self.rate.exp() * nn.functional.softplus(fade + self.bias))
        state = state * fade[..., None, None]
        lacks = (value - (state * key[..., None]).sum(-2)) * torch.sigmoid(amount)[..., None]
        state = state + key[..., None] * lacks[..., None, :]
        results = (state * (query * self.size**-0.5)[..., None]).sum(-2)
        x = x + self.out(self.each(results).flatten(1) * nn.functional.silu(gate))
        gate, wide = self.wide(self.norms[1](x)).chunk(2, -1)
        return x + self.narrow(nn.functional.silu(gate) * wide), joined[..., 1:], state


class DeltaNet(nn.Module):
    """`DeltaLayer`s, one after the other."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DeltaLayer(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, seen: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a token: x [B, width], windows [layers, B, 3 · width, 3] and states [layers, B, heads, size, size] → an
        output [B, width], and the new windows and states.
        """
        kept = []
        for layer, *old in zip(self.layers, seen.unbind(0), state.unbind(0), strict=True):
            x, *new = layer(x, *old)
            kept.append(new)
        return x, torch.stack([seen for seen, _ in kept]), torch.stack([state for _, state in kept])


def deltanet(width: int = 128, heads: int = 4, layers: int = 2) -> Step:
    """Make a step of a gated DeltaNet, by default 2 layers of width 128 with 4 heads."""
    size = width // heads
    states = [StateSpec("seen", (layers, "B", 3 * width, 3)), StateSpec("state", (layers, "B", heads, size, size))]
    return frame_step(DeltaNet(width, heads, layers), width, states)


class Zipformer(nn.Module):
    """A block of Zipformer: feed-forward, attention over cached keys, causal convolution, feed-forward, bypass."""

    def __init__(self, width: int, heads: int, taps: int) -> None:
        super().__init__()
        self.heads, self.taps = heads, taps
        self.one, self.two = (
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.query_key, self.value, self.out = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.into, self.depth = nn.Linear(width, 2 * width), nn.Conv1d(width, width, taps, groups=width)
        self.outof, self.bypass = nn.Linear(width, width), nn.Parameter(torch.full((width,), 0.5))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        """Run frames: x [B, T, width], keys and values [rows, B, width] and last frames [B, width, taps - 1] → an
        output [B, T, width] and the new states.
        """
        start, length = x, x.shape[1]
        x = x + self.one(x)
        query, key = self.query_key(x).chunk(2, -1)
        every = torch.cat((keys, key.transpose(0, 1)))
        held = torch.cat((values, self.value(x).transpose(0, 1)))
        query, rows, cells = (
            part.unflatten(-1, (self.heads, -1)).permute(order)
            for part, order in ((query, (0, 2, 1, 3)), (every, (1, 2, 3, 0)), (held, (1, 2, 0, 3)))
        )
        results = (query @ rows * query.shape[-1] ** -0.5).softmax(-1) @ cells
        x = x + self.out(results.transpose(1, 2).flatten(2))
        value, gate = self.into(x).chunk(2, -1)
        joined = torch.cat((seen, (value * torch.sigmoid(gate)).transpose(1, 2)), 2)
        mixed = self.depth(joined).transpose(1, 2)
        x = x + self.outof(mixed * torch.sigmoid(mixed - 1))
        x = x + self.two(x)
        x = x * (x.square().mean(-1, keepdim=True) + self.bias.exp()).rsqrt()
        return start + (x - start) * self.bypass, every[length:], held[length:], joined[:, :, length:]


def zipformer() -> Step:
    """Make a step of 4 frames of a Zipformer block of width 128."""
    caches = [StateSpec(name, (32, "B", 128)) for name in ("keys", "values")]
    states = [*caches, StateSpec("seen", ("B", 128, 14))]
    return Step(StepSpec(Zipformer(128, 4, 15).eval(), [InputSpec("x", ("B", 4, 128))], states, ["y"]))
