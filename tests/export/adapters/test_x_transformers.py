"""x-transformers' memory in fixed rows: modules with many options beside their own calls."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from growing import bundle_error, step_error
from own_loops import LIMIT, randomised
from support import package
from torch import Tensor, nn
from txl_export.adapters.registry import adapt
from txl_export.adapters.x_transformers import build, step_spec
from txl_export.families.own_module.plan import make_plan
from txl_runtime.errors import UsageError
from txl_runtime.listener import Silent

EXACT = 1e-6  # the package computes softmaxes in float32 whatever the dtype
SEGMENTS = (3, 1, 4, 2, 4, 1, 4)
ROTARY = {"rotary_pos_emb": True}
WRAPPER = {"num_tokens": 23, "max_seq_len": 32, "max_mem_len": 9}
LAYERS = {"dim": 16, "depth": 3, "heads": 2, "attn_dim_head": 8, "verbose": False}
Options = Mapping[str, Any]


def module(wrapper: Options, layers: Options) -> Any:
    package("x_transformers")
    return randomised(build({**WRAPPER, **wrapper, "attn_layers": {**LAYERS, **layers}}))


def own(wrapper: Any, names: list[str], given: Tensor, carried: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """The package's own call with its memory."""
    output, mems = wrapper(given, mems=carried, return_mems=True)
    return output, dict(zip(names, mems, strict=True)), list(mems)


def called(wrapper: Any, spec: Any) -> Any:
    """`own` as a function of a segment and what was carried."""
    names = [entry.name for entry in spec.states if entry.name != "fill"]
    return lambda given, carried: own(wrapper, names, given, carried)


@pytest.mark.parametrize(
    ("wrapper", "layers"),
    [
        pytest.param({}, {}, id="absolute"),
        pytest.param({}, {"rotary_xpos": True}, id="xpos"),
        pytest.param({"shift_mem_down": 1}, ROTARY, id="rotary, shifted"),
        pytest.param({"shift_mem_down": 2}, {"rel_pos_bias": True}, id="T5, shifted by two"),
        pytest.param({"use_abs_pos_emb": False}, {"alibi_pos_bias": True}, id="ALiBi"),
        pytest.param({"scaled_sinu_pos_emb": True}, {}, id="sinusoids"),
        pytest.param({"num_memory_tokens": 2}, ROTARY, id="memory tokens"),
        pytest.param({"tie_embedding": True}, {**ROTARY, "attn_qk_norm": True, "attn_kv_heads": 1}, id="qk norm, MQA"),
        pytest.param(
            {}, {**ROTARY, "attn_flash": True, "use_rmsnorm": True, "ff_glu": True}, id="flash, RMS norm, GLU"
        ),
        pytest.param({"l2norm_embed": True}, {**ROTARY, "weight_tie_layers": True}, id="one layer three times"),
        pytest.param({}, {**ROTARY, "attn_num_mem_kv": 3, "residual_attn": True}, id="keys of its own"),
        pytest.param({}, {**ROTARY, "pre_norm": False, "macaron": True, "shift_tokens": 1}, id="norm behind, shift"),
    ],
)
def test_fixed_rows_compute_what_the_growing_memory_computes(wrapper: Options, layers: Options) -> None:
    plain = module(wrapper, layers)
    spec = step_spec(plain)
    assert spec.lengths
    assert spec.outputs[0].role == "logits"  # type: ignore[union-attr]
    assert step_error(spec, called(plain, spec), SEGMENTS) <= EXACT


def test_a_dynamic_position_bias_which_the_package_computes_in_float32_alone() -> None:
    plain = module({}, {"dynamic_pos_bias": True})
    spec = step_spec(plain)
    assert step_error(spec, called(plain, spec), SEGMENTS, dtype=torch.float32) <= LIMIT / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "layers", "lengths"),
    [
        pytest.param(
            {"num_memory_tokens": 2},
            {**ROTARY, "depth": 2, "attn_qk_norm": True, "attn_kv_heads": 1, "use_rmsnorm": True, "ff_glu": True},
            (4, 1),
            id="rotary",
        ),
        pytest.param(
            {"shift_mem_down": 1}, {"depth": 2, "alibi_pos_bias": True, "attn_flash": True}, (4,), id="ALiBi, shifted"
        ),
    ],
)
def test_a_bundle_beside_the_package(wrapper: Options, layers: Options, lengths: list[int], tmp_path: Path) -> None:
    plain = module(wrapper, layers)
    spec = step_spec(plain)
    assert bundle_error(spec, called(plain, spec), tmp_path / "bundle.txl", lengths) <= LIMIT


def test_features_whose_memory_is_the_last_segment_alone() -> None:
    package("x_transformers")
    plain = build({"dim_in": 5, "dim_out": 7, "max_mem_len": 6, "attn_layers": {**LAYERS, **ROTARY}})
    spec = step_spec(plain.eval())
    assert (spec.inputs[0].shape, spec.inputs[0].tokens, spec.lengths) == (("B", "L", 5), None, True)
    assert step_error(spec, called(plain, spec), (3, 8, 4, 1, 5)) <= EXACT


@pytest.mark.parametrize(
    ("wrapper", "layers", "role", "lengths"),
    [
        ({"average_pool_embed": True}, ROTARY, None, False),
        ({"num_memory_tokens": 2, "memory_tokens_interspersed_every": 2}, ROTARY, "logits", False),
        ({"logits_dim": 5}, ROTARY, None, True),
        ({"return_only_embed": True}, ROTARY, None, True),
    ],
)
def test_what_padding_would_change_has_exact_lengths(
    wrapper: Options, layers: Options, role: str | None, lengths: bool
) -> None:
    spec = step_spec(module(wrapper, layers))
    assert (spec.outputs[0].role, spec.lengths) == (role, lengths)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrapper", "layers", "told"),
    [
        ({}, {"polar_pos_emb": True}, "of its options look at polar_pos_emb"),
        ({}, {**ROTARY, "num_residual_streams": 2}, "look at num_residual_streams"),
        ({}, {**ROTARY, "add_value_residual": True}, "look at add_value_residual"),
        ({}, {"attn_data_dependent_alibi": True}, "look at attn_data_dependent_alibi"),
        ({}, {**ROTARY, "integrate_layers": True}, "look at integrate_layers"),
        ({}, {**ROTARY, "cross_attend": True}, "context must be passed in"),
        ({}, {**ROTARY, "use_adaptive_layernorm": True}, "condition needs to be passed in"),
        ({"recycling": True}, ROTARY, "`recycle_steps` must be provided"),
        ({"embed_num_tokens": {"kind": 3}}, ROTARY, "embed_num_tokens"),
        ({"num_output_heads": 2}, ROTARY, "num_output_heads is above 1, expected 1"),
        ({"max_mem_len": -3}, ROTARY, "max_mem_len of this TransformerWrapper is -3, expected at least 1"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(wrapper: Options, layers: Options, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        adapt("x-transformers", module(wrapper, layers))
    assert told in str(caught.value)


def test_means_with_variances_are_refused_by_name() -> None:
    package("x_transformers")
    config = {"dim_in": 5, "dim_out": 7, "max_mem_len": 6, "probabilistic": True, "attn_layers": {**LAYERS, **ROTARY}}
    with pytest.raises(UsageError, match="probabilistic is True, expected False"):
        step_spec(build(config).eval())


def test_a_decoder_with_a_prefix_is_refused_by_name() -> None:
    x_transformers = package("x_transformers")
    layers = x_transformers.PrefixDecoder(**LAYERS, rotary_pos_emb=True)
    with pytest.raises(UsageError, match="attn_layers is a PrefixDecoder, expected a Decoder"):
        step_spec(x_transformers.TransformerWrapper(**WRAPPER, attn_layers=layers).eval())


def test_a_table_read_at_places_of_the_values_keeps_sequences_together() -> None:
    spec = step_spec(module({}, {"attn_use_cope": True, "attn_cope_max_pos": 16}))
    plan = make_plan(spec, 2, [5], Silent())
    assert plan.streams == "lockstep"
    assert "a batch cannot be run where one sequence holds NaN" in plan.reason


def test_an_encoder_tells_no_next_token() -> None:
    x_transformers = package("x_transformers")
    layers = x_transformers.Encoder(**LAYERS, rotary_pos_emb=True)
    spec = step_spec(x_transformers.TransformerWrapper(**WRAPPER, attn_layers=layers).eval())
    assert (spec.outputs[0].role, spec.lengths) == (None, False)  # type: ignore[union-attr]


def test_a_wrapper_around_it_is_looked_through() -> None:
    plain = module({}, ROTARY)
    assert step_spec(sys.modules["x_transformers"].XLAutoregressiveWrapper(plain)).module is plain


def test_trying_leaves_the_module_as_it_was() -> None:
    plain = module({"use_abs_pos_emb": False}, {"alibi_pos_bias": True}).train()
    step_spec(plain)
    assert plain.training
    assert plain.attn_layers.rel_pos.bias is None


class _Counting(nn.Module):
    """A wrapper's interface over a memory whose mean it adds: that depends on the number of rows."""

    max_mem_len, max_seq_len, num_tokens, shift_mem_down = 4, 8, 5, 0
    average_pool_embed, cls_token = False, None

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.to_logits = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.attn_layers: Any = SimpleNamespace(dim=3, causal=True, layer_types=("a",), layers_execute_order=(0,))

    def forward(
        self, x: Tensor, mems: Any = None, mem_masks: Any = None, return_mems: bool = False, **_: bool
    ) -> tuple[Tensor, Any]:
        hidden = self.token_emb(x.long())
        rows = hidden if mems is None else torch.cat((mems[0], hidden), 1)
        output = self.to_logits(hidden + rows.mean(1, keepdim=True))
        return output, [rows[:, -4:]] if return_mems else SimpleNamespace(hiddens=[hidden])


def test_a_form_that_would_compute_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r"output logits of segment 1 is not what _Counting itself computes"):
        step_spec(_Counting())


def test_another_module_is_refused() -> None:
    with pytest.raises(UsageError, match=r"max_mem_len of this Linear is None"):
        step_spec(nn.Linear(2, 2))
