"""Tests of the export look at bundles that were exported in the same run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def test_no_bundle_of_a_run_before_is_taken(make_bundle: Callable[..., Path], tmp_path_factory) -> None:
    path = make_bundle(verify=False)
    assert not path.is_relative_to(os.environ["TXL_BUNDLES"])
    assert path.is_relative_to(tmp_path_factory.getbasetemp().parent)
