"""The adapter of torchaudio's Emformer, compared with the package's `infer`, `forward` and `transcribe_streaming`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from own_loops import LIMIT, randomised
from support import package
from torch import Tensor
from txl_export.adapters.registry import adapt
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_runtime.errors import UsageError

BASE: dict[str, Any] = {
    "input_dim": 16,
    "num_heads": 2,
    "ffn_dim": 24,
    "num_layers": 2,
    "segment_length": 4,
    "left_context_length": 6,
    "right_context_length": 2,
    "max_memory_size": 3,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as the oracle has it": {},
    "no bank": {"max_memory_size": 0, "activation": "gelu"},
    "no left context": {"left_context_length": 0},
    "nothing ahead": {"right_context_length": 0, "weight_init_scale_strategy": None},
    "neither past nor bank": {"max_memory_size": 0, "left_context_length": 0},
    "long past": {"left_context_length": 11, "max_memory_size": 1, "segment_length": 3, "num_heads": 4},
    "tanh on the bank": {"tanh_on_mem": True, "activation": "silu", "dropout": 0.1, "num_layers": 3},
    "the bank hardly hidden from the summary": {"negative_inf": -2.0},
}
RNNT: dict[str, Any] = {
    "input_dim": 5,
    "encoding_dim": 12,
    "num_symbols": 11,
    "segment_length": 8,
    "right_context_length": 4,
    "time_reduction_input_dim": 8,
    "time_reduction_stride": 4,
    "transformer_num_heads": 2,
    "transformer_ffn_dim": 24,
    "transformer_num_layers": 2,
    "transformer_dropout": 0.1,
    "transformer_activation": "gelu",
    "transformer_left_context_length": 5,
    "transformer_max_memory_size": 2,
    "transformer_weight_init_scale_strategy": "depthwise",
    "transformer_tanh_on_mem": True,
    "symbol_embedding_dim": 8,
    "num_lstm_layers": 1,
    "lstm_layer_norm": True,
    "lstm_layer_norm_epsilon": 1e-5,
    "lstm_dropout": 0.1,
}
EXACT = 1e-6  # the package's softmax is float32 whatever the dtype
PARTS = ("memory", "left_key", "left_value", "past_length")


def emformer(**changes: Any) -> Any:
    """The package's own module with weights that make everything matter."""
    return randomised(package("torchaudio.models").Emformer(**BASE | changes))


class Own:
    """Every sequence streamed by the package alone, by its own call and in its own memory."""

    def __init__(self, module: Any, batch_size: int, infer: str = "infer") -> None:
        self.call, self.held = getattr(module, infer), [None] * batch_size

    def reset(self, rows: Any) -> None:
        for row in rows:
            self.held[row] = None

    def __call__(self, features: Tensor, rows: Any = None) -> Tensor:
        found = {}
        for row in range(len(self.held)) if rows is None else rows:
            given = features[row : row + 1]
            with torch.no_grad():
                found[row], _, self.held[row] = self.call(given, torch.tensor([given.shape[1]]), self.held[row])
        return torch.cat([found[row] for row in sorted(found)])

    def state(self, name: str, row: int) -> Tensor:
        _, layer, part = name.split(".")
        held = self.held[row]
        assert held is not None
        return held[int(layer)][PARTS.index(part)][:, 0]


def segment(module: Any, batch_size: int, random: np.random.Generator, dtype: Any = np.float64) -> Tensor:
    core = getattr(module, "transformer", module)
    length = core.segment_length + core.right_context_length
    shape: tuple[int, ...] = (batch_size, length, core.emformer_layers[0].input_dim)
    if core is not module:
        shape = (batch_size, length, module.time_reduction.stride, module.input_linear.in_features)
    return torch.from_numpy(random.standard_normal(shape).astype(dtype))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sequences_out_of_step_are_what_the_package_infers_for_each_alone(options: dict[str, Any]) -> None:
    """The package itself reads the first sequence's counter for all, so its own batch is wrong here."""
    module = emformer(**options)
    spec, random = adapt("emformer", module), np.random.default_rng(1)
    module.double()
    step, own = Eager(spec, torch.float64), Own(module, 3)
    fresh = fresh_states(spec, 3, torch.float64)
    states = dict(fresh)
    for number in range(8):
        begun = [row for row in range(3) if number in (0, 2 * row)]
        own.reset(begun)
        for name, state in states.items():
            states[name] = state.index_copy(1, torch.tensor(begun), fresh[name][:, begun]) if begun else state
        features = segment(module, 3, random)
        outputs, after = step({"features": features}, states)
        states = dict(after)
        torch.testing.assert_close(outputs["encoded"], own(features), atol=EXACT, rtol=0)
        for name, state in after.items():
            for row in range(3):
                torch.testing.assert_close(state[:, row], own.state(name, row).to(state.dtype), atol=EXACT, rtol=0)
    carried = {part for part, rows in zip(PARTS, own.held[0][0], strict=True) if len(rows)}
    assert {name.split(".")[2] for name in states} == carried


def test_segment_by_segment_is_what_the_package_computes_for_the_whole_utterance() -> None:
    module = emformer()
    spec, random = adapt("emformer", module), np.random.default_rng(2)
    module.double()
    step, states = Eager(spec, torch.float64), fresh_states(spec, 2, torch.float64)
    features = torch.from_numpy(random.standard_normal((2, 9 * 4 + 2, 16)))
    found = []
    for first in range(0, 9 * 4, 4):
        outputs, after = step({"features": features[:, first : first + 6]}, states)
        states = dict(after)
        found.append(outputs["encoded"])
    with torch.no_grad():
        whole, _ = module(features, torch.full((2,), 36))
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=EXACT, rtol=0)


@pytest.mark.parametrize("bank", [0, 2])
def test_a_transcriber_joins_frames_as_the_package_does(bank: int) -> None:
    config = RNNT | {"transformer_max_memory_size": bank}
    model = randomised(package("torchaudio.models").emformer_rnnt_model(**config))
    spec, random = adapt("emformer", model), np.random.default_rng(4)
    assert spec.module is model.transcriber
    assert spec.inputs == adapt("emformer", model.transcriber).inputs
    model.double()
    step, states, held = Eager(spec, torch.float64), fresh_states(spec, 2, torch.float64), None
    for _ in range(5):
        features = segment(model.transcriber, 2, random)
        outputs, after = step({"features": features}, states)
        states = dict(after)
        frames = features.flatten(1, 2)  # 12 of them: two positions and one ahead
        with torch.no_grad():
            expected, _, held = model.transcribe_streaming(frames, torch.full((2,), frames.shape[1]), held)
        torch.testing.assert_close(outputs["encoded"], expected, atol=EXACT, rtol=0)


def test_the_counter_stays_at_the_most_that_it_holds() -> None:
    """In the package it would become negative there, after 2^31 frames, and the past would be forgotten."""
    module = emformer()
    spec, random = adapt("emformer", module), np.random.default_rng(5)
    step, states = Eager(spec), dict(fresh_states(spec, 1))
    for _ in range(5):
        states = dict(step({"features": segment(module, 1, random, np.float32)}, states)[1])
    late = {name: state.fill_(2**31 - 3) if "past" in name else state for name, state in states.items()}
    features = segment(module, 1, random, np.float32)
    outputs, after = step({"features": features}, late)
    assert int(after["layers.01.past_length"]) == 2**31 - 1
    usual = {name: torch.full_like(state, 20) if "past" in name else state for name, state in states.items()}
    assert torch.equal(outputs["encoded"], step({"features": features}, usual)[0]["encoded"])


def test_another_segment_length_is_refused_with_the_module_s_own() -> None:
    spec = adapt("emformer", emformer())
    features = torch.zeros(1, 66, 16)
    with pytest.raises(UsageError, match="4 positions in this module; give --segment-length 4"):
        Eager(spec)({"features": features}, fresh_states(spec, 1))


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Linear(3, 3),
        SimpleNamespace(emformer_layers=[SimpleNamespace(conv=0, ffn0=0)]),
        SimpleNamespace(transcriber=torch.nn.LSTM(3, 3)),
    ],
)
def test_what_is_no_emformer_is_refused(module: Any) -> None:
    with pytest.raises(UsageError, match=r"no emformer_layers with pos_ff, expected torchaudio\.models\.Emformer"):
        adapt("emformer", module)


def test_a_module_that_computes_otherwise_than_the_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another version's layer, or one that somebody has changed: nobody would hear of the difference."""
    module = emformer()
    layer = type(module.emformer_layers[0])
    inner = layer.infer
    monkeypatch.setattr(layer, "infer", lambda *given: (inner(*given)[0] * 1.01, *inner(*given)[1:]))
    with pytest.raises(UsageError, match="output encoded of segment 1 is not what Emformer itself computes"):
        adapt("emformer", module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long past", "transcriber without a bank"])
def test_two_hundred_segments_with_resets_of_single_sequences(name: str, tmp_path: Path) -> None:
    models, random = package("torchaudio.models"), np.random.default_rng(6)
    config = RNNT | {"transformer_max_memory_size": 0, "transformer_left_context_length": 7}
    whole = name not in OPTIONS
    module = randomised(models.emformer_rnnt_model(**config)).transcriber if whole else emformer(**OPTIONS[name])
    core = getattr(module, "transformer", module)
    txl_export.export(
        adapt("emformer", module),
        tmp_path / "bundle.txl",
        batch_size=3,
        segment_length=core.segment_length,
        verify=False,
    )
    model = txl_runtime.load(tmp_path / "bundle.txl", "cpu")
    assert model.manifest.streams == "independent"
    stream, own, resets = model.stream(), Own(module, 3), 0
    for number in range(200):
        if begun := [row for row in range(3) if number == 0 or random.random() < 0.05]:
            resets += len(begun)
            stream.reset(begun)
            own.reset(begun)
        runs = np.flatnonzero(random.random(3) < 0.8) if number else np.arange(3)
        features = segment(module, 3, random, np.float32)
        lengths = np.isin(np.arange(3), runs) * core.segment_length
        found = stream.run({"features": features.numpy()}, lengths)["encoded"]
        if len(runs):
            expected = own(features if core is module else features.flatten(1, 2), runs).numpy()
            np.testing.assert_allclose(found[runs], expected, atol=LIMIT * max(1, abs(expected).max()))
        for state, values in stream.state().items():
            for row in runs:
                np.testing.assert_allclose(values[:, row], own.state(state, row).numpy(), atol=LIMIT, rtol=LIMIT)
    assert resets > 20
