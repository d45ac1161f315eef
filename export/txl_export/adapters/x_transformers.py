"""Makes the step of x-transformers' wrappers with `max_mem_len`: one graph with a fixed number of memory rows.

The wrappers are TransformerWrapper and ContinuousTransformerWrapper. In the package, memories grow by the rows of each
segment. Here each memory has all M rows from the start, the newest at the end, and `fill` counts the filled rows; the
package's own argument `mem_masks` hides rows that are not filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from txl_runtime.errors import UsageError

from txl_export.adapters.proving import Tensors, proven
from txl_export.adapters.refusing import refuse_x_transformers, suspects
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.spec import VALID, InputSpec, Named, OutputSpec, StateSpec, StepSpec


def build(config: Mapping[str, Any]) -> Any:
    """Return a TransformerWrapper over a Decoder; if the config lacks `num_tokens`, a ContinuousTransformerWrapper."""
    import x_transformers

    kind = "TransformerWrapper" if "num_tokens" in config else "ContinuousTransformerWrapper"
    decoder = x_transformers.Decoder(**config["attn_layers"])
    return getattr(x_transformers, kind)(**{**config, "attn_layers": decoder})


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a wrapper, or of the wrapper inside a second one (its `net`)."""
    module = getattr(module, "net", module)
    refuse_x_transformers(module)
    rows, layers = module.max_mem_len, module.attn_layers
    kinds = [layers.layer_types[index] for index in layers.layers_execute_order]
    names = [f"layers.{number:02d}.mem" for number in range(kinds.count("a"))]
    states = [StateSpec(name, ("B", rows, layers.dim)) for name in names]
    states.append(StateSpec("fill", ("B",), dtype="int32"))
    tokens, output = _interface(module, layers)
    spec = StepSpec(module, [tokens], states, [output], step=partial(_step, output=output.name), lengths=True)

    def own(module: Any, inputs: Tensors, carried: Any) -> tuple[Tensors, Tensors, Any]:
        result, mems = module(inputs[tokens.name], mems=carried, return_mems=True)
        return {output.name: result}, dict(zip(names, mems, strict=True)), list(mems)

    most = min(8, module.max_seq_len or 8)
    try:
        return proven((spec, replace(spec, lengths=False)), own, (most, (most + 1) // 2, most))
    except OwnCodeError as error:
        options = suspects(module)
        raise UsageError(f"{error}; of its options look at {', '.join(options)}" if options else str(error)) from error


def _interface(module: Any, layers: Any) -> tuple[InputSpec, OutputSpec]:
    """Return input and output; the role is "logits" only if the output predicts each next token without seeing it."""
    if not hasattr(module, "token_emb"):
        width = getattr(module.project_in, "in_features", layers.dim)
        return InputSpec("features", ("B", "L", width)), OutputSpec("output")
    spec, head = InputSpec("tokens", ("B", "L"), tokens=module.num_tokens), module.to_logits
    each = head is not None and not module.average_pool_embed and module.cls_token is None
    is_head = each and layers.causal and getattr(head, "out_features", module.num_tokens) == module.num_tokens
    return spec, OutputSpec("embeddings" if head is None else "logits", role="logits" if is_head else None)


def _step(module: Any, inputs: Named, states: Named, output: str) -> tuple[Named, Named]:
    valid, fill = inputs.pop(VALID, None), states["fill"]
    names = [name for name in states if name != "fill"]
    memories, (x,) = [states[name] for name in names], inputs.values()
    (batch, rows, _), length = memories[0].shape, x.shape[1]
    if valid is not None and x.is_floating_point():
        x = torch.where((torch.arange(length) < valid[:, None])[:, :, None], x, 0)
    filled = torch.arange(rows) >= rows - fill[:, None]
    result, seen = module(x, mems=memories, mem_masks=[filled] * len(names), return_intermediates=True)
    before = seen.hiddens[0].shape[1] - length  # memory tokens before the segment are kept, too
    new = before + (torch.full_like(fill, length) if valid is None else valid)
    if hasattr(module, "shift_mem_down"):
        memories = memories[module.shift_mem_down :] + memories[: module.shift_mem_down]
    else:  # a ContinuousTransformerWrapper remembers only the last segment
        memories, fill = [torch.zeros_like(memory) for memory in memories], torch.zeros_like(fill)
    joined = [torch.cat(pair, 1) for pair in zip(memories, seen.hiddens, strict=True)]
    if valid is None:
        newest = [both[:, -rows:] for both in joined]
    else:  # the end is padding: keep the `rows` rows before it
        first = torch.arange(batch) * joined[0].shape[1] + new
        newest = [both.flatten(0, 1)[first[:, None] + torch.arange(rows)] for both in joined]
    return {output: result}, {**dict(zip(names, newest, strict=True)), "fill": torch.clamp(fill + new, max=rows)}
