"""Every code base against what its original code computed (tests/fixtures/oracle; float64, float32 weights).

Four chained segments per case: all log-probabilities and every memory. The second half turns one switch of the dialect
or one tensor at a time and expects the comparison to fail, so that a pass means something.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from txl_export.checkpoints import cntxl, code_bases_with_names, fastai, hf, kimiyoung, nvidia, remixl
from txl_export.checkpoints.imported import Imported, State
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.weights import Weights, check_weights
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.errors import CheckpointError

ORACLE = Path(__file__).parents[2] / "fixtures" / "oracle"
IMPORTERS = {
    "kimiyoung": kimiyoung,
    "nvidia": nvidia,
    "hf_transfo_xl": hf,
    "remixl": remixl,
    "fastai": fastai,
    "cntxl": cntxl,
}
SEGMENTS = 4
# Both sides are float64; what is left are sinusoids, which some originals build in float64 and this project in float32.
TOLERANCE = 1e-6

ALL = sorted(path.stem for path in ORACLE.glob("*/*.json"))
NO_LANGUAGE_MODEL = ["x30_gtrxl"]
CASES = [name for name in ALL if name not in NO_LANGUAGE_MODEL]


@dataclass(frozen=True)
class Model:
    """The arguments of `PaperModel`; mutated one field at a time below."""

    config: ModelConfig
    dialect: Dialect
    memory_length: int
    state: Weights


@dataclass(frozen=True)
class Case:
    """One oracle case, everything batch first."""

    imported: Imported
    model: Model
    tokens: list[Tensor]
    logprobs: list[Tensor]
    memories: list[list[Tensor]]


def read(name: str) -> tuple[dict[str, object], dict[str, Tensor], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A case's facts, state dict, float32 arrays and float64 arrays."""
    (facts_file,) = ORACLE.glob(f"*/{name}.json")
    facts = json.loads(facts_file.read_text())
    arrays = dict(np.load(facts_file.with_suffix(".npz")))
    exact = dict(np.load(facts_file.with_suffix(".f64.npz")))
    state = {key[3:]: torch.from_numpy(array) for key, array in arrays.items() if key.startswith("sd/")}
    return facts, state, arrays, exact


def values_of(facts: dict[str, object]) -> dict[str, object]:
    """The family's own config of a case, with what was set after the model was built."""
    for key in ("ctor", "model_config", "config"):
        if key in facts:
            return {**facts[key], **facts.get("opts", {})}
    raise AssertionError(f"no config among {list(facts)}")


def dialect_of(imported: Imported) -> Dialect:
    said, of_segment = imported.evaluation, imported.window_of == "segment"
    windowed = said.same_length and not of_segment
    return Dialect(
        family=imported.family,
        memory_start=imported.memory_start,
        window=said.memory_length + imported.window_beyond_memory if windowed else None,
        segment_window=of_segment,
        clamp_length=said.clamp_length or None,
    )


@functools.cache
def load(name: str) -> Case:
    facts, state, arrays, exact = read(name)
    family = facts["family"]
    imported = IMPORTERS[family].from_state(State(state, name), values_of(facts))
    model = Model(
        imported.config,
        dialect_of(imported),
        imported.evaluation.memory_length,
        check_weights(imported.config, imported.weights, name),
    )
    tokens_time_first = family in ("kimiyoung", "nvidia", "remixl")
    memory_time_first = tokens_time_first or family == "hf_transfo_xl"

    def batch_first(array: np.ndarray, swap: bool) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.transpose(0, 1) if swap else tensor

    def memories(s: int) -> list[Tensor]:
        if not model.memory_length:
            return [torch.zeros(facts["bsz"], 0, imported.config.d_model)] * imported.config.n_layer
        stacked = exact.get(f"mems/{s}")
        layers = stacked if stacked is not None else [exact[f"mems/{s}/{i}"] for i in range(imported.config.n_layer)]
        return [batch_first(layer, memory_time_first) for layer in layers]

    return Case(
        imported,
        model,
        [batch_first(arrays[f"tokens/{s}"], tokens_time_first) for s in range(SEGMENTS)],
        [batch_first(exact[f"logprob/{s}"], tokens_time_first) for s in range(SEGMENTS)],
        [memories(s) for s in range(SEGMENTS)],
    )


def run(model: Model, tokens: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    reference = PaperModel(model.config, model.dialect, model.memory_length, model.state, torch.float64)
    memory = reference.initial_memory(tokens[0].shape[0])
    logprobs, memories = [], []
    for segment in tokens:
        result, memory = reference(segment, memory)
        logprobs.append(result)
        memories.append(memory)
    return logprobs, memories


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    assert [tuple(tensor.shape) for tensor in found] == [tuple(tensor.shape) for tensor in expected]
    return max(
        float((one - other).abs().amax()) if one.numel() else 0.0 for one, other in zip(found, expected, strict=True)
    )


def test_every_code_base_has_a_case_and_no_case_is_forgotten():
    assert {load(name).imported.family for name in CASES} == {"kimiyoung", "nvidia", "hf", "remixl", "fastai", "cntxl"}
    assert {load(name).model.config.attn_type for name in CASES} == {0, 1, 2, 3}
    assert set(NO_LANGUAGE_MODEL) < set(ALL)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_and_memories_are_the_originals(name):
    case = load(name)
    logprobs, memories = run(case.model, case.tokens)
    assert worst(logprobs, case.logprobs) <= TOLERANCE
    for found, expected in zip(memories, case.memories, strict=True):
        assert worst(found, expected) <= TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_a_state_is_recognised_as_its_own_family_alone(name):
    facts, state, _, _ = read(name)
    expected = [] if name in NO_LANGUAGE_MODEL else [IMPORTERS[facts["family"]].NAME]
    assert code_bases_with_names(state) == expected


# ---- what a state alone can get wrong


def refused(name: str, state: dict[str, Tensor] | None = None, **changes: object) -> str:
    """Return the message of a family's importer for a changed case."""
    facts, own, _, _ = read(name)
    given = State(own if state is None else state, name)
    with pytest.raises(CheckpointError) as caught:
        IMPORTERS[facts["family"]].from_state(given, {**values_of(facts), **changes})
    return str(caught.value)


def test_what_cannot_be_expressed_is_refused_by_name():
    assert "ext_len 2" in refused("k01_base", ext_len=2)
    assert "ext_len 2" in refused("n01_base", ext_len=2)
    assert "ext_len 2" in refused("x10_remixl", ext_len=2)
    assert "give --extended-length 0" in refused("k01_base", ext_len=2)
    assert "attn_type" in refused("h01_base", attn_type=1)
    assert "relative_encoding" in refused("x01_cntxl_prompt", relative_encoding=False)
    for name, value in {"scale": False, "mask": False, "learned_pos_enc": True, "encode_position": True}.items():
        assert f"{name} is {value}" in refused("x20_fastai_xl", **{name: value})
    assert "Swish" in refused("x20_fastai_xl", act="Activation.Swish")
    assert "tie_projs has 2" in refused("n10_adp_div1", tie_projs=[False, True])
    assert "pre_lnorm" in refused("k01_base", pre_lnorm=None)


@pytest.mark.parametrize("name", ["k01_base", "n12_adp_div2", "h01_base", "x01_cntxl_prompt", "x10_remixl"])
def test_a_missing_tensor_is_named(name):
    _, state, _, _ = read(name)
    (gone,) = [key for key in state if key.endswith((".0.dec_attn.o_net.weight", ".0.attention.dense.bias"))]
    assert gone in refused(name, {key: tensor for key, tensor in state.items() if key != gone})


def test_a_second_input_of_musicautobot_is_refused():
    _, state, _, _ = read("x20_fastai_xl")
    assert "0.beat_enc.beat_enc.weight" in refused(
        "x20_fastai_xl", state | {"0.beat_enc.beat_enc.weight": torch.zeros(2, 2)}
    )


def test_a_model_parallel_part_is_refused():
    _, state, _, _ = read("x01_cntxl_prompt")
    part = state | {name: state[name][:1] for name in ("transformer.r_w_bias", "transformer.r_r_bias")}
    message = refused("x01_cntxl_prompt", part | {"word_embeddings.weight": state["word_embeddings.weight"][:25]})
    assert "1 of 2 heads" in message
    assert "change_mp.py" in message


def test_nvidia_weights_of_its_own_are_dealt_out_to_the_clusters():
    facts, state, _, _ = read("n10_adp_div1")
    own = torch.arange(60 * 16, dtype=torch.float32).reshape(60, 16)
    imported = nvidia.from_state(State(state | {"crit.out_layers_weights.0": own}, "n10"), values_of(facts))
    checked = check_weights(imported.config, imported.weights, "n10")
    assert torch.equal(torch.cat([checked[f"softmax.tables.{c}"] for c in range(4)]), own)


def test_nvidia_projections_follow_the_shared_list_or_their_own():
    """div_val 1 with a narrow embedding: one shared projection for tied clusters, one each for the others."""
    facts, state, _, _ = read("n10_adp_div1")
    shared, untied = torch.ones(16, 8), torch.full((16, 8), 2.0)
    narrow = {name: tensor[..., :8] for name, tensor in state.items() if "emb_layers" in name or "cluster_w" in name}
    projections = {"word_emb.emb_projs.0": shared, "crit.shared_out_projs.0": shared, "crit.out_projs.0": untied}
    imported = nvidia.from_state(State(state | narrow | projections, "n10"), {**values_of(facts), "d_embed": 8})
    checked = check_weights(imported.config, imported.weights, "n10")
    assert torch.equal(checked["softmax.projections.0"], untied)
    assert not [name for name in checked if name.startswith("softmax.projections.") and not name.endswith("0")]
    assert "crit.out_projs.2 is missing" in refused(
        "n10_adp_div1", state | narrow | projections, d_embed=8, tie_projs=[False, True, False, True]
    )


def test_fastai_with_biases_gelu_and_one_dropout():
    facts, state, _, _ = read("x20_fastai_xl")
    places = {"ff.layers.3": "ff.layers.2", "ff.layers.6": "ff.layers.5"}
    renamed = {}
    for name, tensor in state.items():
        for old, new in places.items():
            name = name.replace(old, new)
        renamed[name] = tensor
        if name.endswith(("mhra.attention.weight", "mhra.r_attn.weight", "mhra.out.weight")):
            renamed[name.replace("weight", "bias")] = torch.ones(tensor.shape[0])
    del renamed["1.decoder.bias"]
    values = {**values_of(facts), "bias": True, "double_drop": False, "act": "GeLU", "out_bias": False}
    imported = fastai.from_state(State(renamed, "x20"), values)
    assert imported.config.attention_bias
    assert imported.config.activation == "gelu_tanh"
    assert not imported.config.softmax_bias
    assert "layers.01.attention.query.bias" in check_weights(imported.config, imported.weights, "x20")


# ---- one thing wrong at a time


def dialect(**changes: object) -> Callable[[Model], Model]:
    return lambda model: replace(model, dialect=msgspec.structs.replace(model.dialect, **changes))


def config(**changes: object) -> Callable[[Model], Model]:
    return lambda model: replace(model, config=msgspec.structs.replace(model.config, **changes))


def clusters_reversed(model: Model) -> Model:
    flipped = {name: tensor.flip(0) for name, tensor in model.state.items() if name.startswith("softmax.cluster.")}
    assert flipped
    return replace(model, state=model.state | flipped)


def swapped(one: str, other: str) -> Callable[[Model], Model]:
    """Each layer's two tensors exchanged."""

    def swap(model: Model) -> Model:
        state = dict(model.state)
        for name in [name for name in state if f".attention.{one}" in name]:
            partner = name.replace(one, other)
            state[name], state[partner] = model.state[partner], model.state[name]
        assert any(not torch.equal(state[name], model.state[name]) for name in state)
        return replace(model, state=state)

    return swap


def shared_projection(model: Model) -> Model:
    """The untied projection of cluster 0 taken for the embedding's."""
    state = {name: tensor for name, tensor in model.state.items() if name != "softmax.projections.0"}
    assert len(state) < len(model.state)
    return replace(model, state=state)


def distances_reversed(model: Model) -> Model:
    names = ("distance.keys", "distance.biases", ".positions")
    flipped = {name: tensor.flip(0) for name, tensor in model.state.items() if name.endswith(names)}
    assert flipped
    return replace(model, state=model.state | flipped)


MISTAKES = [
    ("k50_attn1", "distances reversed", distances_reversed),
    ("k60_attn2_mem0", "a memory", lambda model: replace(model, memory_length=1)),
    ("k70_attn3", "distances reversed", distances_reversed),
    ("k30_adp_div2", "clusters reversed", clusters_reversed),
    ("k30_adp_div2", "projection 0 tied", shared_projection),
    ("k01_base", "zeros start", dialect(memory_start="zeros")),
    ("h01_base", "empty start", dialect(memory_start="empty")),
    ("k03_same_length", "window M - 1", dialect(window=7)),
    ("k03_same_length", "window M + 1", dialect(window=9)),
    ("x10_remixl", "window M + 1", dialect(window=9)),
    ("x01_cntxl_prompt", "window L - 1", dialect(window=5, segment_window=False)),
    ("x01_cntxl_prompt", "window L + 1", dialect(window=7, segment_window=False)),
    ("k01_base", "a window", dialect(window=8)),
    ("k05_clamp4", "clamp - 1", dialect(clamp_length=3)),
    ("k05_clamp4", "clamp + 1", dialect(clamp_length=5)),
    ("k01_base", "no embedding scale", config(embedding_scale=1.0)),
    ("x01_cntxl_prompt", "embedding scale", config(embedding_scale=4.0)),
    ("k01_base", "u and v swapped", swapped("content_bias", "position_bias")),
    ("x01_cntxl_prompt", "q and k swapped", swapped("query", "key")),
    ("x20_fastai_xl", "k and v swapped", swapped("key", "value")),
    ("k02_pre_lnorm", "norm after the block", config(pre_lnorm=False)),
    ("x01_cntxl_prompt", "no final norm", config(final_norm=False)),
    ("x01_cntxl_prompt", "exact gelu", config(activation="gelu")),
    ("x20_fastai_xl", "gelu", config(activation="gelu_tanh")),
]


@pytest.mark.parametrize(("name", "mistake"), [pytest.param(n, m, id=f"{n}: {what}") for n, what, m in MISTAKES])
def test_a_mistake_is_seen(name, mistake):
    case = load(name)
    logprobs, _ = run(mistake(case.model), case.tokens)
    assert worst(logprobs, case.logprobs) > 1e-3


def test_another_layer_norm_epsilon_is_seen():
    case = load("h08_eps")
    assert math.isclose(case.model.config.layer_norm_epsilon, 1e-2)
    logprobs, _ = run(config(layer_norm_epsilon=1e-5)(case.model), case.tokens)
    assert worst(logprobs, case.logprobs) > 1e-4
