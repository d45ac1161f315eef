"""Results are kept out of what they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from txl_runtime.errors import UsageError

from txl_deploy.places import refuse_inside


def test_a_file_among_what_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "corpus")
    for out in ("corpus/out.jsonl", "corpus/deep/out.jsonl", "link/out.jsonl", "corpus"):
        with pytest.raises(UsageError, match="expected a place beside it"):
            refuse_inside(tmp_path / out, tmp_path / "corpus", tmp_path / "model.txl")
    refuse_inside(tmp_path / "corpus-out.jsonl", tmp_path / "corpus")
