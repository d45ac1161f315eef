"""Cases of other packages' models with state: their numbers, and how far a module and its bundle are from them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import txl_export
import txl_runtime
from stand_ins.stateful import (
    adaptive_span,
    block_recurrent,
    compressive,
    compressive_labml,
    emformer,
    episodic,
    gtrxl,
    mamba,
    memorizing,
    memory_tokens,
    memory_tokens_gpt2,
    nearest_neighbours,
    recurrent_policy,
    rwkv,
    universal,
    x_transformers,
    xlnet,
)
from support import FIXTURES
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.spec import StepSpec

FOLDER = FIXTURES / "oracle_stateful"
BUILDS: Mapping[str, Callable[..., StepSpec]] = {
    "as01_adaptive_span": adaptive_span.build,
    "br01_block_recurrent": block_recurrent.build,
    "ct01_base": compressive.build,
    "ct02_partial_segment": compressive.build,
    "em01_emformer": emformer.build,
    "gd01_policy_step": gtrxl.build_di_engine,
    "gr01_policy_step": gtrxl.build_rllib,
    "kn01_knnlm": nearest_neighbours.build,
    "lc01_labml": compressive_labml.build,
    "ma01_mamba": mamba.build,
    "mm01_episodic": episodic.build,
    "mt01_knn": memorizing.build,
    "rb01_rmt_gpt2": memory_tokens_gpt2.build,
    "rm01_xl": memory_tokens.build,
    "rm02_no_xl": memory_tokens.build,
    "rp01_lstm_policy": recurrent_policy.build,
    "rw01_rwkv": rwkv.build,
    "ut01_act": universal.build,
    "xn01_uni": xlnet.build,
    "xt01_rotary_shift": x_transformers.build,
    "xt02_t5_bias": x_transformers.build,
}
GROWTH = {"ct01_base": "stages", "ct02_partial_segment": "stages", "lc01_labml": "stages", "mt01_knn": "stages"}
"""The growth that "auto" ends with after it has tried to leave rows open: a convolution or a store takes no 0 rows."""
Arrays = dict[str, Any]


class Case:
    """One case: its facts, its step, and for each segment what goes in and what must come out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        self._given = dict(np.load(FOLDER / f"{name}.npz", allow_pickle=False))
        self._exact = dict(np.load(FOLDER / f"{name}.f64.npz", allow_pickle=False))
        self.batch_size: int = self.facts["batch"]
        self.resets: list[Any] = [segment["reset"] for segment in self.facts["segments"]]
        self.lengths: list[int] = [segment["length"] for segment in self.facts["segments"]]

    def build(self) -> StepSpec:
        """The step with the case's weights."""
        return BUILDS[self.name](self.weights(), self.facts["config"])

    def weights(self) -> dict[str, torch.Tensor]:
        """The package's own state dict."""
        return {name[3:]: torch.from_numpy(self._given[name]) for name in self._given if name.startswith("sd/")}

    def segment_lengths(self) -> list[int]:
        """The L's to export, largest first; the stored lengths count what lies ahead as well."""
        inputs = self.build().inputs
        if not any("L" in entry.shape for entry in inputs):
            return [1]
        ahead = max(entry.lookahead for entry in inputs)
        return sorted({length - ahead for length in self.lengths}, reverse=True)

    def initial(self) -> Arrays:
        """The states before the first segment."""
        return _under(self._given, "init/")

    def inputs(self, segment: int) -> Arrays:
        """The inputs of a segment."""
        return _under(self._given, f"in/{segment}/")

    def expected(self, segment: int) -> tuple[Arrays, Arrays]:
        """The outputs of a segment and the states after it, in float64."""
        outputs = _under(self._exact, f"out/{segment}/")
        if self.name == "rw01_rwkv":  # the package returns B positions where L is 1
            outputs = {name: array[:, -self.lengths[segment] :] for name, array in outputs.items()}
        return outputs, _under(self._exact, f"state/{segment}/")


def _under(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def errors(found: Sequence[tuple[Arrays, Arrays]], case: Case, logits: str | None = None) -> tuple[float, float]:
    """The largest errors of outputs and of states, each relative to max(1, the largest value of that tensor).

    Args:
        found: outputs and states of each segment.
        case: what they must be.
        logits: an output that has become log-probabilities.
    """
    worst = [0.0, 0.0]
    for segment, parts in enumerate(found):
        for index, (ours, exact) in enumerate(zip(parts, case.expected(segment), strict=True)):
            assert set(ours) == set(exact)
            for name, array in ours.items():
                wanted = exact[name]
                if index == 0 and name == logits:
                    wanted = torch.from_numpy(wanted).log_softmax(-1).numpy()
                worst[index] = max(worst[index], relative_error(np.asarray(array), wanted))
    return worst[0], worst[1]


def relative_error(found: Any, wanted: Any) -> float:
    """The largest difference of two arrays of one shape, relative to max(1, the second's largest value)."""
    assert found.shape == wanted.shape, f"{found.shape} in place of {wanted.shape}"
    largest = max(1.0, float(np.abs(wanted).max(initial=0)))
    return float(np.abs(found - wanted).max(initial=0)) / largest


def run_module(case: Case, forget_resets: bool = False) -> list[tuple[Arrays, Arrays]]:
    """Outputs and states of every segment by the module itself, in float64."""
    spec = case.build()
    spec.module.double()
    step = Eager(spec, torch.float64)
    initial = fresh_states(spec, case.batch_size, torch.float64)
    states = dict(initial)
    axes = {entry.name: entry.shape.index("B") for entry in spec.states}
    found = []
    for segment, reset in enumerate(case.resets):
        if reset == "all" and not forget_resets:
            states = dict(initial)
        elif reset and not forget_resets:
            rows = torch.tensor(reset)
            for name, axis in axes.items():
                held, fresh = states[name], initial[name]
                assert held is not None
                assert fresh is not None
                states[name] = held.index_copy(axis, rows, fresh.index_select(axis, rows))
        inputs = {name: torch.from_numpy(array) for name, array in case.inputs(segment).items()}
        outputs, after = step(inputs, states)
        states = dict(after)
        found.append(({k: v.numpy() for k, v in outputs.items()}, {k: v.numpy() for k, v in after.items()}))
    return found


def export_case(case: Case, path: Path, **options: Any) -> Any:
    """Export a case's step; what `txl_export.export` returns."""
    options.setdefault("verify", False)
    return txl_export.export(
        case.build(), path, batch_size=case.batch_size, segment_length=case.segment_lengths(), **options
    )


@functools.cache
def exported(name: str, growth: str = "") -> Any:
    """Export a case; many tests share its bundle, which is there as long as the process is."""
    folder = Path(_EXPORTED.name) / f"{name}-{growth}"
    return export_case(Case(name), folder, growth=growth or GROWTH.get(name, "auto"))


_EXPORTED = tempfile.TemporaryDirectory(prefix="oracle-stateful-")


def run_bundle(case: Case, path: Path) -> list[tuple[Arrays, Arrays]]:
    """Outputs and states of every segment by the runtime.

    Where sequences run all or none, it ends before the first reset of single sequences.
    """
    model = txl_runtime.load(path, backend="cpu")
    stream = model.stream()
    found = []
    for segment, reset in enumerate(case.resets):
        if reset not in (None, "all") and model.manifest.streams == "lockstep":
            break
        if reset is not None:
            stream.reset(None if reset == "all" else reset)
        outputs = stream.run(case.inputs(segment))
        found.append((outputs, stream.state()))
    return found
