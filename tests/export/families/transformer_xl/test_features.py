"""`export --features`: rows that end with what enters the last feed-forward layer, which changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import random_state, small_config
from torch import Tensor
from txl_engines import composing
from txl_export.exporting import export
from txl_export.families.transformer_xl.family import prepare
from txl_export.families.transformer_xl.network import Network
from txl_export.options import ExportOptions
from txl_runtime import load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.listener import Silent

SIZES: dict[str, Any] = {"batch_size": 2, "segment_length": [8, 1], "memory_length": 6}
FORMS: dict[str, dict[str, Any]] = {
    "pre-norm": {"pre_lnorm": True},
    "post-norm, clusters": {"cutoffs": [20, 40], "div_val": 2},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rows_end_with_what_enters_the_last_feed_forward_layer(kept_bundles: Callable[..., Path], form: Any) -> None:
    """The paper's model says what enters it; log-probabilities have the bits of a bundle without."""
    more, plain = (
        load(kept_bundles(form, **SIZES, verify=False, **asked), "cpu", threads=1) for asked in ({"features": True}, {})
    )
    ids = np.random.default_rng(0).integers(60, size=(2, 21)).astype(np.int32)
    rows = more.stream().features(ids)
    assert rows.shape == (2, 21, 32)
    np.testing.assert_array_equal(rows[..., :16], plain.stream().features(ids))
    np.testing.assert_array_equal(more.stream().feed(ids), plain.stream().feed(ids))
    assert more.manifest.model_id == plain.manifest.model_id
    config, entered = small_config(**form), list[Tensor]()
    reference = prepare(random_state(config), ExportOptions(config=config, **SIZES), Silent()).builder.reference()
    reference.watch = lambda name, given: entered.append(given) if name == "layers.01.feed_forward.inner" else None
    memory = reference.initial_memory(2)
    for first in range(0, 21, 8):
        memory = reference.hidden(torch.from_numpy(ids[:, first : first + 8]), memory)[1]
    np.testing.assert_allclose(rows[..., 16:], torch.cat(entered, 1).numpy(), atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_wrong_features_do_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    config, asked = small_config(), {**SIZES, "features": True, "precision": precision}
    state = random_state(config)
    parity = export(state, tmp_path / "right.txl", config=config, **asked).parity
    assert parity is not None
    assert [gate.passed for gate in parity.gates if gate.name.startswith("features ")] == [True]
    real = Network.around_entering

    def wrong(self: Network, i: int, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        return real(self, i, hidden, attended)[0], hidden

    monkeypatch.setattr(Network, "around_entering", wrong)
    with pytest.raises(CheckError, match="features"):
        export(state, tmp_path / "wrong.txl", config=config, **asked)


@pytest.mark.parametrize("without", [{"memory": "hidden"}, {"memory_length": 0}], ids=str)
def test_without_a_ring_there_are_no_features(tmp_path: Path, without: dict[str, Any]) -> None:
    config = small_config()
    with pytest.raises(UsageError, match=r"--features is given with .*, expected a memory of keys and values, whose"):
        export(random_state(config), tmp_path / "b.txl", config=config, **{**SIZES, **without, "features": True})


def test_engines_of_rolled_memory_are_not_made_of_it(kept_bundles: Callable[..., Path]) -> None:
    bundle = open_bundle(kept_bundles(**SIZES, verify=False, features=True))
    for update, expected in (("ring", None), ("rolled", "was exported with --features, which engines of rolled")):
        program = next(each for each in composing.whole_programs(bundle.manifest, update) if each.kind != "logprobs")
        if expected is None:
            assert composing.compose(bundle, program)
            continue
        with pytest.raises(UsageError, match=expected):
            composing.compose(bundle, program)
