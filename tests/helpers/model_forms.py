"""Exports each stored case by an adapter, by a file that a user writes, or by a minimal module of its tensors.

The package that an adapter or a file needs may not be there; then it is the minimal module.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle_stateful import Case, relative_error
from support import PACKAGES
from txl_export.adapters.registry import load_adapted

ADAPTED = {
    "em01_emformer": "emformer",
    "gd01_policy_step": "di-engine",
    "gr01_policy_step": "rllib",
    "ma01_mamba": "mamba",
    "mm01_episodic": "episodic",
    "rm01_xl": "recurrent-memory",
    "rm02_no_xl": "recurrent-memory",
    "rp01_lstm_policy": "recurrent-policy",
    "xt01_rotary_shift": "x-transformers",
    "xt02_t5_bias": "x-transformers",
}
"""Names of adapters by case."""
WRITTEN = {
    "br01_block_recurrent": "block_recurrent",
    "ct01_base": "compressive",
    "ct02_partial_segment": "compressive",
    "lc01_labml": "compressive_labml",
    "mt01_knn": "memorizing",
    "rb01_rmt_gpt2": "rmt_gpt2",
    "rw01_rwkv": "rwkv",
    "xn01_uni": "xlnet_counted",
}
"""Users' files, in tests/own_modules, by case."""


@dataclass(frozen=True)
class Form:
    """A case as a user exports it.

    Attributes:
        spec: of its step.
        how: "adapter NAME", the user's file, or "minimal module".
    """

    spec: Any
    how: str


def form_of(case: Case) -> Form:
    """The form of a case that its packages allow."""
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if name := ADAPTED.get(case.name):
                return Form(load_adapted(name, case.facts["config"], case.weights()), f"adapter {name}")
            if name := WRITTEN.get(case.name):
                return Form(_written(case, name), f"own_modules/{name}.py")
        except ModuleNotFoundError:
            pass
        except Exception as error:
            if "is not installed" not in str(error):
                raise
    return Form(case.build(), "minimal module")


def _written(case: Case, name: str) -> Any:
    module = importlib.import_module(f"own_modules.{name}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.pt"
        config = case.facts["config"] | ({"max_knn_memories": 32} if name == "memorizing" else {})
        torch.save({"config": config, "model": case.weights()}, file)
        return module.build(str(file))


def differences(found: Any, case: Case, logprobs: str | None) -> tuple[float, float]:
    """The largest errors of outputs and states; of a state with all its rows from the start, those of its newest rows.

    Args:
        found: outputs and states of each segment.
        case: what they must be.
        logprobs: the output that has become log-probabilities.
    """
    worst = [0.0, 0.0]
    for segment, (outputs, states) in enumerate(found):
        wanted, after = case.expected(segment)
        for name, exact in wanted.items():
            if name == logprobs:
                exact = torch.from_numpy(exact).log_softmax(-1).numpy()
            worst[0] = max(worst[0], relative_error(outputs[name], exact))
        for name, exact in after.items():
            if name not in states and "fill" in states:  # the package's own counter has another form
                continue
            worst[1] = max(worst[1], relative_error(_newest(states[name], exact.shape), exact))
    return worst[0], worst[1]


def _newest(array: Any, sizes: tuple[int, ...]) -> Any:
    found = np.asarray(array)
    assert found.ndim == len(sizes)
    return found[tuple(slice(have - want, have) for have, want in zip(found.shape, sizes, strict=True))]
