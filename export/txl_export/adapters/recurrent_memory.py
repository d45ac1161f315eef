"""Makes the step of recurrent-memory-transformer-pytorch: one graph for the first segment and all later ones.

In the package, the first segment reads no earlier keys and values. Here the state of keys and values has all rows from
the start, the newest at the end, and a counter of filled rows. The package takes no mask for these rows. So hooks hide
unfilled rows from its attention, and shift its rotary positions to where they would begin without unfilled rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_export.adapters.proving import Tensors, proven
from txl_export.adapters.refusing import refuse_recurrent_memory, refuse_short
from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec, StateSpec, StepSpec

_BEGIN = 9998
"""First rotary position in the tables of a module without XL memories. In the package the first token has position
10000, and the null key 9999; the tables give entry 9998 to position 0."""


def build(config: Mapping[str, Any]) -> Any:
    """Return a RecurrentMemoryTransformer."""
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    return RecurrentMemoryTransformer(**config)


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a RecurrentMemoryTransformer, or of a wrapper with such a `transformer`."""
    module = getattr(module, "transformer", module)
    attentions = _attentions(module)
    refuse_recurrent_memory(module, attentions)
    count, width = module.read_memory_emb.shape
    states, names = [StateSpec("read_memories", ("B", count, width))], []
    if module.use_xl_memories:
        names = [f"layers.{number:02d}.xl_kv" for number in range(len(attentions))]
        _, heads, size = attentions[0].null_kv.shape
        states += [StateSpec(name, (2, "B", heads, module.xl_mem_len, size)) for name in names]
    if names or not module.always_have_read_memories:
        states.append(StateSpec("fill", ("B",), dtype="int32"))
    tokens = InputSpec("tokens", ("B", "L"), tokens=module.token_emb.num_embeddings)

    def own(module: Any, inputs: Tensors, carried: Any) -> tuple[Tensors, Tensors, Any]:
        memories, caches = carried or (None, None)
        logits, memories, caches = module(inputs["tokens"], memories, xl_memories=caches)
        held = {"read_memories": memories} | dict(zip(names, caches or (), strict=True))
        return {"logits": logits}, held, (memories, caches)

    always = module.always_have_read_memories
    most = min(module.seq_len, 32) if always else module.seq_len
    output = OutputSpec("logits", role="logits" if module.causal else None)
    step, lengths = partial(_step, _angles(module)), [module.seq_len]
    spec = StepSpec(module, [tokens], states, [output], step=step, segment_lengths=lengths)
    return proven([spec], own, (most, (most + 1) // 2 if always else most, most))


def _step(angles: Mapping[torch.dtype, Tensor], module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
    tokens, memories, fill = inputs["tokens"], states["read_memories"], states.get("fill")
    caches = {name: state for name, state in states.items() if name.endswith(".xl_kv")}
    (batch, length), count = tokens.shape, memories.shape[1]
    rows = max((cache.shape[3] for cache in caches.values()), default=0)
    always = module.always_have_read_memories
    refuse_short(length, count, rows, always)
    with ExitStack() as hooks:
        if fill is not None:
            memory = ((fill > 0) | always)[:, None].expand(batch, count)
            others = torch.ones(batch, length + count, dtype=torch.bool)
            seen = torch.cat((torch.arange(rows) >= rows - fill[:, None], others[:, :1], memory, others), 1)
            for part in _attentions(module):
                hooks.enter_context(part.attend.register_forward_pre_hook(partial(_hide, seen), with_kwargs=True))
        if angles:
            before = _BEGIN - module.xl_mem_len + (rows - states["fill"] if caches else torch.zeros(1).int())
            hooks.enter_context(module.rotary_pos_emb.register_forward_hook(partial(_turned, angles, before)))
        logits, memories, new = module(tokens, memories, xl_memories=list(caches.values()) or None)
    rows_after = new[0].shape[3] if caches else count
    after = {name: F.pad(part, (0, 0, rows - rows_after, 0)) for name, part in zip(caches, new or (), strict=True)}
    after |= {"read_memories": memories} | ({} if fill is None else {"fill": torch.full_like(fill, rows_after)})
    return {"logits": logits}, after


def _attentions(module: Any) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, "null_kv")]


def _hide(seen: Tensor, _: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """Hide keys that are False in `seen` [B, keys] or in the call's own mask; a forward pre-hook of attentions."""
    return arguments, named | {"mask": seen[:, None, None] & (True if named["mask"] is None else named["mask"])}


def _angles(module: Any) -> dict[torch.dtype, Tensor]:
    """Return tables of rotary angles by dtype: first position 0, then all other positions; {} without rotary positions.

    Tokens begin at position 10000, where float32 angles are coarse; so whole turns are subtracted in float64.
    """
    if module.rotary_pos_emb is None:
        return {}
    positions = torch.arange(_BEGIN - module.xl_mem_len, _BEGIN + 2 + module.xl_mem_len + module.seq_len)
    positions[0] = 0
    angles = deepcopy(module.rotary_pos_emb).double()(positions) % (2 * math.pi)
    return {torch.float64: angles, torch.float32: angles.float()}


def _turned(angles: Mapping[torch.dtype, Tensor], before: Tensor, rotary: Any, arguments: Any, _: Any) -> Tensor:
    """Return angles of positions minus `before` [B]; position 0, a memory's, stays 0. A forward hook."""
    places = torch.where(arguments[0] > 0, arguments[0] - before[:, None], 0)
    return angles[rotary.inv_freq.dtype][places][:, None]
