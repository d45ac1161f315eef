"""Settings that are refused before anything starts, and the name that a model is served under."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
from txl_runtime.errors import UsageError

from txl_deploy.serve import settings
from txl_deploy.serve.settings import ServerSettings

SECONDS = ("idle_seconds", "checkpoint_every", "drain_seconds")


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, -1.0])
@pytest.mark.parametrize("name", SECONDS)
def test_seconds_are_finite(name, seconds):
    with pytest.raises(UsageError) as caught:
        ServerSettings(bundle=Path("model.txl"), **{name: seconds})
    said = str(caught.value)
    assert said.startswith(f"{name} is {seconds}, expected a finite number of seconds")
    assert said.endswith(f"check --{name.replace('_', '-')}")


def test_a_name_that_no_answer_could_hold_is_refused():
    with pytest.raises(UsageError, match=r"name is 'caf\\udce9', expected text that is UTF-8; choose another --name"):
        ServerSettings(bundle=Path("model.txl"), name="caf\udce9")
    assert ServerSettings(bundle=Path("model.txl"), name="café 😀").served_name == "café 😀"


@pytest.mark.parametrize("found", [["127.0.0.1", "192.0.2.7"], ["192.0.2.7", "::1"]])
def test_a_name_that_also_stands_for_an_address_beyond_loopback_needs_a_token(found, monkeypatch):
    monkeypatch.setattr(settings, "addresses", lambda host: found)
    with pytest.raises(UsageError, match="host 'both' can be reached from other machines and no token is set"):
        ServerSettings(bundle=Path("model.txl"), host="both").require_token()
    monkeypatch.setattr(settings, "addresses", lambda host: ["127.0.0.1", "::1"])
    ServerSettings(bundle=Path("model.txl"), host="both").require_token()


def test_a_folder_whose_name_is_no_utf_8_is_served_by_its_escaped_name(letters, serve, tmp_path):
    server = serve(Path(shutil.copytree(letters, tmp_path / os.fsdecode(b"caf\xe9.txl"))))
    assert server.get("/v1/models").json()["data"][0]["id"] == "caf\\xe9"
    assert server.complete(prompt="ab", max_tokens=1, model="caf\\xe9")["model"] == "caf\\xe9"
    assert server.stream(prompt="ab", max_tokens=1)[0]["model"] == "caf\\xe9"
    assert ServerSettings(bundle=tmp_path / "café.txl").served_name == "café"
