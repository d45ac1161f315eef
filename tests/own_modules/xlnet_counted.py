"""XLNet of transformers with all rows of its memory from the start and a counter: one graph, sequences independent.

txl-deploy export tests/own_modules/xlnet_counted.py:build --weights xlnet.pt -o xlnet.txl

The model takes no mask for its memory, so this step runs its layers itself. Positions are counted from the end of the
memory, so that rows in front of it which nothing sees change nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import XLNetConfig, XLNetLMHeadModel
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec, read_weights


def step(model: Any, inputs: dict[str, Any], states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One segment."""
    core, tokens = model.transformer, inputs["tokens"]
    batch, length, rows = *tokens.shape, model.config.mem_len
    empty = torch.arange(rows)[:, None] < rows - states["fill"]  # the newest rows stand at the end
    ahead = core.create_mask(length, rows)[:, :, None] > 0
    unseen = ahead | torch.cat((empty, torch.zeros((length, batch), dtype=torch.bool)))
    positions = core.relative_positional_encoding(length, rows + length, bsz=batch)
    x, kept = core.word_embedding(tokens.transpose(0, 1)), {}
    for layer, block in enumerate(core.layer):
        name = f"layers.{layer:02d}.mem"
        kept[name] = torch.cat((states[name], x))[-rows:]
        x, _ = block(x, None, _floats(unseen, x), None, positions, None, mems=states[name])
    fill = torch.clamp(states["fill"] + length, max=rows)
    return {"logits": model.lm_loss(x.transpose(0, 1))}, kept | {"fill": fill}


def _floats(mask: Tensor, like: Tensor) -> Tensor:
    return mask[..., None].to(like.dtype)


def spec(model: Any) -> StepSpec:
    """Return the step with its inputs, states and outputs."""
    config = model.config
    if config.attn_type != "uni" or config.same_length or config.reuse_len or config.bi_data:
        raise ValueError("bi, same_length and reuse_len look at the rows there are, not at a counter; use xlnet.py")
    shape = (config.mem_len, "B", config.d_model)
    states = [StateSpec(f"layers.{layer:02d}.mem", shape) for layer in range(config.n_layer)]
    return StepSpec(
        model,
        [InputSpec("tokens", ("B", "L"), tokens=config.vocab_size)],
        [*states, StateSpec("fill", ("B",), dtype="int32")],
        [OutputSpec("logits", role="logits")],
        step=step,
    )


def build(weights: str) -> StepSpec:
    """The model of a checkpoint."""
    stored = read_weights(weights)
    model = XLNetLMHeadModel(XLNetConfig(**stored["config"]))
    model.load_state_dict(stored["model"])
    return spec(model)
