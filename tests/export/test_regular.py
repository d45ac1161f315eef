"""Only regular files are read; what becomes another kind between the look and the opening is not waited for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from txl_export.regular import read_regular
from txl_runtime.errors import CheckpointError


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_file_that_becomes_a_pipe_before_it_is_opened_is_refused_at_once(tmp_path, monkeypatch):
    path, opened = tmp_path / "model.pt", os.open
    path.write_bytes(b"data")

    def switched(place: Any, flags: int, *more: Any, **options: Any) -> int:
        if Path(place) == path:
            assert flags & os.O_NONBLOCK, "it would wait for a writer"
            path.unlink()
            os.mkfifo(path)
        return opened(place, flags, *more, **options)

    monkeypatch.setattr(os, "open", switched)
    with pytest.raises(CheckpointError, match="not a regular file, expected one"):
        read_regular(path, 100)
