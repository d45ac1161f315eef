"""Other packages' models with state, as own modules: outputs and every state are what the packages computed."""

from __future__ import annotations

import numpy as np
import pytest
from oracle_stateful import BUILDS, FOLDER, Case, errors, run_module
from txl_export.families.own_module.sizes import fresh_states

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
