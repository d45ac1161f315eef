"""Makes the step of torchaudio's Emformer.

A segment reads its own frames, frames ahead of it, past keys and values, and a memory bank. The package cuts the past
to the rows that the batch's first sequence has filled. Here all rows take part, and a mask hides rows that a sequence
has not filled, so one graph of fixed sizes is enough. Each sequence counts its own past frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.adapters.proving import Tensors, proven
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec, StateSpec, StepSpec

PARTS = tuple(enumerate(("memory", "left_key", "left_value", "past_length")))
"""Index and name of each state of a layer, in the package's order."""


def build(config: Mapping[str, Any]) -> Any:
    """Return an `Emformer`; if the config has `num_symbols`, an RNN-T whose transcriber is an Emformer."""
    from torchaudio.models import Emformer, emformer_rnnt_base, emformer_rnnt_model

    rnnt = emformer_rnnt_base if len(config) == 1 else emformer_rnnt_model
    return (rnnt if "num_symbols" in config else Emformer)(**config)


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of an `Emformer`, or of an RNN-T's transcriber, which takes `stride` frames per position."""
    module = getattr(module, "transcriber", module)
    core = getattr(module, "transformer", module)
    layers = getattr(core, "emformer_layers", ())
    if not layers or not all(hasattr(layer, "pos_ff") for layer in layers):
        raise UsageError(
            f"this {type(core).__name__} has no emformer_layers with pos_ff, expected torchaudio.models.Emformer or an "
            "RNN-T over one; where layers have a convolution there is more state: give a StepSpec of your own"
        )
    width = wide = layers[0].input_dim
    past, frame = core.left_context_length, [width]
    if core is not module:
        frame, wide = [module.time_reduction.stride, module.input_linear.in_features], module.output_linear.out_features
    features = InputSpec("features", ("B", "L", *frame), lookahead=core.right_context_length)
    rows = {"memory": core.max_memory_size, "left_key": past, "left_value": past}
    states = []
    for name in (f"layers.{number:02d}" for number in range(len(layers))):
        states += [StateSpec(f"{name}.{part}", (most, "B", width)) for part, most in rows.items() if most]
        states.append(StateSpec(f"{name}.past_length", (1, "B"), dtype="int32"))
    encoded, lengths = OutputSpec("encoded", ("B", "L", wide)), [core.segment_length]
    spec = StepSpec(module, [features], states, [encoded], step=_step, segment_lengths=lengths)

    def own(module: Any, inputs: Tensors, carried: Any) -> tuple[Tensors, Tensors, Any]:
        x = inputs["features"].flatten(1, -2)
        encoded, _, carried = module.infer(x, torch.tensor([x.shape[1]]), carried)
        held = {f"layers.{number:02d}.{part}": layer[at] for number, layer in enumerate(carried) for at, part in PARTS}
        return {"encoded": encoded}, held, carried

    return proven([spec], own, [core.segment_length] * 3)


def _step(module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
    """Run one segment through all layers, whose first axis is time."""
    core, x = getattr(module, "transformer", module), inputs["features"].transpose(0, 1)
    length, ahead = core.segment_length, core.right_context_length
    if len(x) != length + ahead:
        raise UsageError(f"a segment has {length} positions in this module; give --segment-length {length}")
    x, right = (x if core is module else module.input_linear(x).flatten(2)).split((length, ahead))
    summary, after = x.mean(0, keepdim=True), dict(states)
    for number, layer in enumerate(core.emformer_layers):
        x, right, summary = _layer(layer, f"layers.{number:02d}.", x, right, summary, after)
    encoded = x.transpose(0, 1)
    return {"encoded": encoded if core is module else module.layer_norm(module.output_linear(encoded))}, after


def _layer(layer: Any, name: str, x: Tensor, right: Tensor, summary: Tensor, states: Named) -> tuple[Tensor, ...]:
    """Run a layer and update its `states`; return segment, frames ahead and summary for the next layer."""
    attention, (length, batch, width), ahead, own = layer.attention, x.shape, len(right), torch.cat((right, x))
    none = x.new_zeros(0, batch, width)
    memory, old_key, old_value = (states.get(name + part, none) for part in ("memory", "left_key", "left_value"))
    past, bank, left = states[f"{name}past_length"], len(memory), len(old_key)
    normed = layer.layer_norm_input(own)
    asked = torch.cat((normed, normed[ahead:].mean(0, keepdim=True))) if bank else normed
    key, value = attention.emb_to_key_value(torch.cat((memory, normed))).chunk(2, 2)
    parts = attention.emb_to_query(asked), torch.cat((key, old_key)), torch.cat((value, old_value))
    query, keys, values = (part.unflatten(2, (attention.num_heads, -1)).permute(1, 2, 0, 3) for part in parts)
    unseen = (torch.arange(len(asked)) == ahead + length)[:, None] & (torch.arange(keys.shape[2]) < bank)
    scores = (query * attention.scaling @ keys.mT).masked_fill(unseen, attention.negative_inf)
    needs = [*range(bank * length, 0, -length), *[0] * (ahead + length), *range(left, 0, -1)]
    scores = scores.masked_fill((past[0, :, None] < torch.tensor(needs))[:, None, None], -torch.inf)
    attended = attention.out_proj((scores.softmax(-1) @ values).permute(2, 0, 1, 3).flatten(2))
    y = own + attended[: ahead + length]
    y = layer.layer_norm_output(y + layer.pos_ff(y))
    new = {"memory": _newest(memory, summary)}
    new |= {"left_key": _newest(old_key, key[-length:], past), "left_value": _newest(old_value, value[-length:], past)}
    states |= {name + part: rows for part, rows in new.items() if name + part in states}
    states[f"{name}past_length"] = past.clamp(max=2**31 - 1 - length) + length  # int32 ends at 2**31 - 1
    return y[ahead:], y[:ahead], attended[-1:].tanh() if attention.tanh_on_mem else attended[-1:].clamp(-10, 10)


def _newest(old: Tensor, rows: Tensor, past: Tensor | None = None) -> Tensor:
    """Append `rows` to `old` and return the last len(old) rows of both.

    If `past` is given, the number of frames before this segment, [1, B], slots that are not filled repeat filled rows,
    as in the package.
    """
    count = len(old) - len(rows)
    if past is None or count <= len(rows):
        return torch.cat((old, rows))[len(rows) :]
    slots, filled = torch.arange(count)[:, None], past.clamp(max=len(old))
    source = slots + len(rows) + filled * (slots < count - filled)
    return torch.cat((old.gather(0, source[:, :, None].expand(-1, -1, old.shape[2])), rows))
