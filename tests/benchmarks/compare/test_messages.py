"""Messages of tests are recorded by test, and one that is lost or changed is found."""

from __future__ import annotations

import json

import messages
import pytest

TEST = """
import pytest
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener

class Heard(Listener):
    def warn(self, message):
        self.last = message

def test_refused(tmp_path):
    Heard().warn("look")
    with pytest.raises(UsageError):
        raise UsageError(f"{tmp_path}/file: WORDS")

def test_quiet():
    pass
"""


def recorded(tmp_path, name, words):
    (tmp_path / "test_one.py").write_text(TEST.replace("WORDS", words))
    out = tmp_path / name
    assert messages.record(out, tmp_path, ["test_one.py", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]) == 0
    return out


@pytest.mark.device
def test_a_message_that_changes_is_found(tmp_path, capfd):
    old, same = recorded(tmp_path, "old.json", "no such file"), recorded(tmp_path, "same.json", "no such file")
    told = ["warning: look", "UsageError: TMP/file: no such file"]
    assert json.loads(old.read_text()) == {"test_one.py::test_refused": told}
    assert messages.compare(old, same) == 0
    capfd.readouterr()
    assert messages.compare(old, recorded(tmp_path, "new.json", "gone")) == 1
    assert "  - UsageError: TMP/file: no such file\n  + UsageError: TMP/file: gone\n" in capfd.readouterr().out
