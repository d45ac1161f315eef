"""The importers: a state of tensors and a config of one code base, changed here and there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from txl_export.checkpoints import CODE_BASES, identify, import_model
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.families.transformer_xl.settings import resolve
from txl_export.families.transformer_xl.weights import check_weights
from txl_export.options import ExportOptions
from txl_runtime.errors import TxlError

from fuzz.choices import Choices
from fuzz.edits import VALUES, edited

LONGEST = 1024
SHAPES = ((), (0,), (1,), (2, 0), (1, 1), (3,), (4, 4), (1, 2, 3), (8, 1), (1 << 20, 0))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float64)


def one_input(data: bytes) -> None:
    """Import one of the good models after some changes of its config, its tensors and what stands around them."""
    choices = Choices(data)
    bases = _bases()
    family, state, config, extra = choices.pick(bases)
    config, state = edited(config, choices, 4), dict(state)
    for _ in range(choices.number(4)):
        _change(state, choices)
    around = edited(extra, choices, 3) if choices.flag() else extra
    if family == "nvidia":
        content: Any = {"model_config": config, "model_state": state, **_mapping(around)}
        content = edited_shallow(content, choices)
    elif family == "remixl":
        content = {"state_dict": state, "model_setting": config, **_mapping(around)}
    elif family == "fastai":
        content = {"model": state, "config": config, **_mapping(around)}
    elif family == "txl":
        content = {"format": "txl-deploy.checkpoint", "version": 1, "config": config, "state": state}
        content = edited_shallow(content, choices)
    else:
        content = state
    asked = choices.pick(("auto", family, family, *CODE_BASES))
    found, unwrapped = identify(content, asked, "the file")
    imported = import_model(found, unwrapped, config if isinstance(config, dict) else None, "the file")
    weights = check_weights(imported.config, imported.weights, "the file")
    held = sum(tensor.numel() for tensor in state.values() if isinstance(tensor, Tensor))
    made = sum(tensor.numel() for tensor in weights.values())
    assert made <= 16 * held + 64, f"{made} weights of {held} elements"
    try:
        dialect, sizes, _ = resolve(imported, ExportOptions(memory_length=4, clamp_length=0, same_length=False))
    except TxlError:
        return
    assert sizes.memory_length == 4
    assert dialect.window is None


def seeds() -> Iterator[bytes]:
    """Every good model as it is, and with a change of each kind."""
    for number, (family, _, _, _) in enumerate(_bases()):
        asked = 3 + list(CODE_BASES).index(family)
        yield bytes([number, 0, 0, 0]) + b"\0" * 4
        yield bytes([number, 0, 0, 0, 0, asked])
        for kind in range(8):
            yield bytes([number, 1, kind, 1, kind, 0, 0, kind, 0, 3, 1])


def _change(state: dict[str, Any], choices: Choices) -> None:
    """One tensor gone, renamed, of another shape or type, or something else entirely."""
    if not state:
        return
    name = choices.pick(sorted(state, key=str))
    match choices.number(8):
        case 0:
            del state[name]
        case 1:
            state[name] = torch.zeros(choices.pick(SHAPES), dtype=choices.pick(DTYPES))
        case 2:
            state[name] = state[choices.pick(sorted(state, key=str))]
        case 3 if isinstance(state[name], Tensor):
            state[name] = state[name].to(choices.pick(DTYPES))
        case 4 if isinstance(state[name], Tensor):
            state[name] = state[name].flatten()
        case 5:
            state[choices.text()] = state.pop(name)
        case 6:
            state[name] = choices.pick(VALUES)
        case 7:
            state[name] = Stub("torch.nn.modules.linear.Linear", {"a": 1})
        case 8 if isinstance(state[name], Tensor) and state[name].is_floating_point():
            state[name] = state[name] * float("nan")
        case _:
            pass


def edited_shallow(content: dict[str, Any], choices: Choices) -> dict[str, Any]:
    """The outermost mapping with at most one of its entries replaced; tensors are never copied."""
    if choices.number(3) == 3:
        content[choices.pick(sorted(content))] = choices.pick((*VALUES, Stub("data_utils.Corpus", {"vocab": 1})))
    return content


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


@cache
def _bases() -> tuple[tuple[str, dict[str, Tensor], dict[str, Any], dict[str, Any]], ...]:
    """Small models: family, state, config, and what else its file may hold."""
    found = []
    for family in CODE_BASES:
        state, config = _small(family)
        found.append((family, state, config, {"vocab": None, "epoch": 3}))
    return tuple(found)


def _small(family: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    draws = torch.Generator().manual_seed(0)

    def made(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
        return {name.replace("__", "."): torch.randn(shape, generator=draws) for name, shape in shapes.items()}

    if family == "txl":
        config: dict[str, Any] = {"vocab_size": 6, "n_layer": 1, "n_head": 1, "d_model": 2, "d_head": 2, "d_inner": 3}
        config |= {"d_embed": 2, "cutoffs": [2, 4], "div_val": 1, "embedding_scale": 1.0, "memory_length": 4}
        from support import random_state

        return random_state(config), config
    if family == "cntxl":
        config = {"num_layers": 1, "vocab_size": 6, "hidden_size": 2, "num_attention_heads": 1}
        config |= {"relative_encoding": True, "max_memory_length": 4}
        layer = "transformer.layers.0"
        state = {f"{layer}.{name}.weight": shape for name, shape in CNTXL.items()}
        state |= {f"{layer}.{name}.bias": shape[:1] for name, shape in CNTXL.items()}
        state |= {"word_embeddings.weight": (6, 2), "transformer.r_w_bias": (1, 2), "transformer.r_r_bias": (1, 2)}
        state |= {f"transformer.final_layernorm.{part}": (2,) for part in ("weight", "bias")}
        return made(**state), config
    if family == "fastai":
        config = {"n_layers": 1, "n_heads": 1, "d_model": 2, "d_head": 2, "d_inner": 3, "mem_len": 4, "ctx_len": 2}
        own = "0.layers.0"
        state = {f"{own}.mhra.ln.{part}": (2,) for part in ("weight", "bias")}
        state |= {f"{own}.ff.layers.0.weight": (3, 2), f"{own}.ff.layers.0.bias": (3,)}
        state |= {f"{own}.ff.layers.3.weight": (2, 3), f"{own}.ff.layers.3.bias": (2,)}
        state |= {f"{own}.ff.layers.6.{part}": (2,) for part in ("weight", "bias")}
        state |= {f"{own}.mhra.r_attn.weight": (2, 2), f"{own}.mhra.out.weight": (2, 2)}
        state |= {
            f"{own}.mhra.attention.weight": (6, 2),
            "0.encoder.weight": (6, 2),
            "0.u": (1, 1, 2),
            "0.v": (1, 1, 2),
        }
        return made(**state), config
    config = {"n_token": 6, "n_layer": 1, "n_head": 1, "d_model": 4, "d_head": 2, "d_inner": 3, "d_embed": 4}
    config |= {"pre_lnorm": False, "div_val": 1, "cutoffs": [], "mem_len": 4, "tgt_len": 2, "clamp_len": -1}
    config |= {"same_length": False, "attn_type": 0, "tie_weight": True, "tie_projs": [False]}
    prefix = "transformer." if family == "hf" else ""
    own = f"{prefix}layers.0"
    state = {f"{own}.dec_attn.qkv_net.weight": (6, 4), f"{own}.dec_attn.r_net.weight": (2, 4)}
    state |= {f"{own}.dec_attn.o_net.weight": (4, 2), f"{own}.pos_ff.CoreNet.0.weight": (3, 4)}
    state |= {f"{own}.pos_ff.CoreNet.0.bias": (3,), f"{own}.pos_ff.CoreNet.3.weight": (4, 3)}
    state |= {f"{own}.pos_ff.CoreNet.3.bias": (4,), f"{prefix}r_w_bias": (1, 2), f"{prefix}r_r_bias": (1, 2)}
    state |= {f"{own}.{name}.layer_norm.{part}": (4,) for name in ("dec_attn", "pos_ff") for part in ("weight", "bias")}
    if family == "remixl":
        config["n_head"] = 2
        state |= {"r_w_bias": (2, 2), "r_r_bias": (2, 2), f"{own}.dec_attn.qkv_net.weight": (12, 4)}
        state |= {f"{own}.dec_attn.r_net.weight": (4, 4), f"{own}.dec_attn.o_net.weight": (4, 4)}
        state |= {"word_emb.lut.weight": (6, 4), "linear_proj.weight": (6, 4), "linear_proj.bias": (6,)}
        return made(**state), config
    config |= {"cutoffs": [2, 4], "div_val": 2}
    widths = (4, 2, 1)
    state |= {f"{prefix}word_emb.emb_layers.{c}.weight": (2, width) for c, width in enumerate(widths)}
    state |= {f"{prefix}word_emb.emb_projs.{c}": (4, width) for c, width in enumerate(widths)}
    if family == "nvidia":
        config["tie_projs"] = [True, False, False]
        state |= {f"crit.out_layers_biases.{c}": (2,) for c in range(3)}
        state |= {"crit.shared_out_projs.0": (4, 4), "crit.out_projs.1": (4, 2), "crit.out_projs.2": (4, 1)}
    else:
        state |= {f"crit.out_layers.{c}.bias": (2,) for c in range(3)}
        state |= {f"crit.out_projs.{c}": (4, width) for c, width in enumerate(widths)}
    state |= {"crit.cluster_weight": (2, 4), "crit.cluster_bias": (2,)}
    if family == "hf":
        config["vocab_size"] = config.pop("n_token")
    return made(**state), config


CNTXL = {
    "attention.query_key_value": (6, 2),
    "attention.relative": (2, 2),
    "attention.dense": (2, 2),
    "mlp.dense_h_to_4h": (8, 2),
    "mlp.dense_4h_to_h": (2, 8),
    "input_layernorm": (2,),
    "post_attention_layernorm": (2,),
}
