"""Other packages' models with state, as own modules: outputs and every state are what the packages computed."""

from __future__ import annotations

import numpy as np
import pytest
import txl_runtime
from oracle_stateful import BUILDS, FOLDER, Case, errors, exported, run_bundle, run_module
from txl_export.families.own_module.sizes import fresh_states

LIMIT = 1e-4
EXACT = 1e-6  # some packages compute parts in float32 whatever the dtype; then their numbers are good to this
CASES = sorted(BUILDS)


def test_the_cases_are_there() -> None:
    assert len(CASES) >= 12
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == CASES


@pytest.mark.parametrize("name", CASES)
def test_the_module_computes_what_the_package_computed(name: str) -> None:
    case = Case(name)
    outputs, states = errors(run_module(case), case)
    assert outputs <= EXACT
    assert states <= EXACT


@pytest.mark.parametrize("name", CASES)
def test_states_start_as_the_packages_start(name: str) -> None:
    case = Case(name)
    ours = fresh_states(case.build(), case.batch_size)
    for state, array in case.initial().items():
        found = ours[state]
        assert found is not None
        if state == "read_memories":  # no memory is the same as zeros there
            array = np.zeros(found.shape, np.float32)
        if state == "recurrent.00.state":  # an empty list is the learned start there
            learned = case.build().module.get_parameter("layers.1.0.state_container.init_state")
            array = np.broadcast_to(learned.numpy(), found.shape)
        assert np.array_equal(found.numpy(), array)


@pytest.mark.parametrize("name", [name for name in CASES if any(Case(name).resets)])
def test_a_forgotten_reset_shows_in_outputs_and_states(name: str) -> None:
    case = Case(name)
    first = next(segment for segment, reset in enumerate(case.resets) if reset)
    found = run_module(case, forget_resets=True)[first]
    for ours, exact in zip(found, case.expected(first), strict=True):
        assert any(
            ours[name].shape != exact[name].shape or abs(ours[name] - exact[name]).max() > 1e-3 for name in exact
        )


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", CASES)
def test_the_bundle_carries_outputs_and_every_state_through_all_segments(name: str) -> None:
    case = Case(name)
    found = run_bundle(case, exported(name).path)
    outputs, states = errors(found, case)
    assert outputs <= LIMIT
    assert states <= LIMIT
    assert len(found) == (4 if name == "rw01_rwkv" else len(case.resets))


@pytest.mark.slow
def test_a_package_that_mixes_its_sequences_runs_in_lockstep() -> None:
    made = exported("rw01_rwkv")
    assert made.manifest.streams == "lockstep"
    with pytest.raises(txl_runtime.TxlError, match="lockstep"):
        txl_runtime.load(made.path, "cpu").stream().reset([1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gd01_policy_step", "ma01_mamba", "rp01_lstm_policy"])
def test_a_forgotten_reset_of_one_sequence_shows_in_the_bundle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(name)
    made = exported(name)
    monkeypatch.setattr(txl_runtime.Stream, "reset", lambda stream, rows=None: None)
    outputs, states = errors(run_bundle(case, made.path), case)
    assert outputs > LIMIT
    assert states > LIMIT
