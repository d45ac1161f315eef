"""Faults that a Transformer-XL's bundle could have: each is found, and some by comparing bits alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import txl_export
from seeded_bundle_faults import transformer_xl_faults
from support import save_checkpoint, small_config
from txl_export.proof.bits import IDLE, INDEPENDENT
from txl_runtime.errors import BackendError

WINDOWED = {"same_length": True, "clamp_length": 4}
FAULTS = transformer_xl_faults(60, 1e-4)
BY_BITS = "a neighbour leaks a last digit"


def failing(folder: Path, checkpoint: Path) -> set[str]:
    """The gates that a bundle fails; an engine that refuses it is found as well."""
    try:
        parity = txl_export.verify(folder, checkpoint=checkpoint)
    except BackendError as error:
        return {str(error)}
    return {gate.name for gate in parity.gates if gate.passed is False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("seeded") / "model.pt", small_config(**WINDOWED))


def put(make_bundle: Callable[..., Path], title: str, place: Path) -> Path:
    copy = shutil.copytree(make_bundle(config=WINDOWED, batch_size=3, verify=False), place / "copy.txl")
    FAULTS[title](copy)
    return copy


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("title", [title for title in FAULTS if title != BY_BITS])
def test_a_fault_is_found(make_bundle, checkpoint, tmp_path, title):
    assert failing(put(make_bundle, title, tmp_path), checkpoint)


@pytest.mark.slow
def test_what_is_far_below_every_limit_is_found_by_bits(make_bundle, checkpoint, tmp_path):
    found = failing(put(make_bundle, BY_BITS, tmp_path), checkpoint)
    assert found >= {IDLE, INDEPENDENT}
    assert not [name for name in found if "(bits)" not in name]
