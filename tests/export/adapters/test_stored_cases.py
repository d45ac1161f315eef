"""The stored cases of packages that have an adapter or a user's file: modules and bundles give what they computed."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import oracle_stateful
import pytest
import txl_export
import txl_runtime
from model_forms import ADAPTED, WRITTEN, differences, form_of
from oracle_stateful import GROWTH, Case, export_case, run_bundle, run_module
from support import PACKAGES, package
from txl_export.adapters.registry import load_adapted
from txl_runtime.errors import TxlError

REPOSITORY = Path(__file__).parents[2] / "stand_ins" / "episodic_repository"
EXACT = {"gd01_policy_step": 1e-12, "gr01_policy_step": 1e-12, "mm01_episodic": 1e-12}
"""The other packages compute parts in float32 whatever the dtype: 1e-6."""
LIMIT = 1e-4


@pytest.fixture(params=sorted(ADAPTED))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case whose step is the adapter's."""
    found = Case(request.param)
    more = {"repository": str(REPOSITORY)} if found.name == "mm01_episodic" else {}
    for name in ("transformer", "model"):  # which the repository's files are called
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(PACKAGES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what packages say while they are imported
        try:
            spec: Any = load_adapted(ADAPTED[found.name], found.facts["config"] | more, found.weights())
        except TxlError as error:
            if "is not installed" in str(error):
                pytest.skip(str(error))
            raise
    monkeypatch.setattr(oracle_stateful, "BUILDS", {found.name: lambda weights, config: spec})
    return found


def test_a_step_that_would_be_another_is_refused_by_the_user_s_file() -> None:
    made = package("transformers")
    sizes = {"vocab_size": 23, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "attn_type": "uni"}
    model = made.XLNetLMHeadModel(made.XLNetConfig(**sizes, dropout=0.0, mem_len=7, same_length=True))
    with pytest.raises(ValueError, match=r"xlnet\.py"):
        package("own_modules.xlnet_counted").spec(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_the_bundle_of_a_users_file_carries_what_the_package_computed(name: str, tmp_path: Path) -> None:
    case = Case(name)
    form = form_of(case)
    if form.how == "minimal module":
        pytest.skip(f"what {WRITTEN[name]} needs is not installed; make packages")
    lengths, growth = sorted(set(case.lengths), reverse=True), GROWTH.get(name, "auto")
    options = {"batch_size": case.batch_size, "segment_length": lengths, "growth": growth, "verify": False}
    made = txl_export.export(form.spec, tmp_path / "own.txl", **options)
    found = run_bundle(case, made.path)
    assert len(found) == (4 if name == "rw01_rwkv" else len(case.resets))
    logits = next((output.name for output in made.manifest.outputs if output.role == "logprobs"), None)
    assert max(differences(found, case, logits)) <= LIMIT


def test_the_adapters_module_computes_what_the_package_computed(case: Case) -> None:
    assert max(differences(run_module(case), case, None)) <= EXACT.get(case.name, 1e-6)


@pytest.mark.slow
def test_its_bundle_carries_what_the_package_computed(case: Case, tmp_path: Path) -> None:
    made = export_case(case, tmp_path / "bundle.txl")
    assert made.manifest.streams == "independent"
    assert len(made.manifest.programs) == len(case.segment_lengths())
    logits = next((output.name for output in made.manifest.outputs if output.role == "logprobs"), None)
    assert max(differences(run_bundle(case, made.path), case, logits)) <= LIMIT
    if case.name == "ma01_mamba":
        stream, tokens = txl_runtime.load(made.path, "cpu").stream(), np.random.default_rng(0).integers(0, 24, (2, 7))
        assert stream.score(tokens).shape == (2, 6)
        assert len(list(stream.generate(tokens, 3, seed=0))) == 3
