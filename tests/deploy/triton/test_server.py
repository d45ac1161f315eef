"""Packages in a running Triton server: its Python backend, and clients over HTTP and gRPC."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from deploy.triton.running import exercise, installed, running, runs
from frozen import frozen
from step_models import counting, recurrent
from support import until

from txl_deploy.triton.repository import package_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Three models: of tokens, with a sequence more than it has rows; without; one that forgets sequences soon."""
    installed()
    folder = tmp_path_factory.mktemp("triton")
    bundles = {"tokens": folder / "tokens.txl"}
    bundles["tokens"].symlink_to(frozen("ring"))
    bundles["arrays"] = recurrent().write(folder / "arrays.txl")
    bundles["idle"] = counting().write(folder / "idle.txl")
    package_python(bundles["tokens"], folder / "a", sequences=4)
    package_python(bundles["arrays"], folder / "b", sequences=6)
    package_python(bundles["idle"], folder / "c", sequences=3, idle_seconds=1)
    with running(folder / "log", folder / "a", folder / "b", folder / "c") as started:
        started.bundles = bundles
        assert started.ready(), started.text()
        yield started


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("tokens", "tokens"),
        ("arrays", "arrays"),
        ("slots", "tokens"),
        ("idle", "idle"),
        ("refusals", "tokens"),
        ("generation", "tokens-generate"),
    ],
)
def test_clients_get_what_a_stream_alone_gives(server, name, model):
    exercise(name, server, bundle=server.bundles[model.removesuffix("-generate")], model=model)


def test_the_probe_of_the_package_answers_and_a_process_that_died_is_seen_by_it_alone(tmp_path):
    """kill -9 of a model's process, then of the server; another model goes on, and nothing is left running."""
    bundles = {name: make().write(tmp_path / f"{name}.txl") for name, make in (("one", counting), ("other", recurrent))}
    for name, bundle in bundles.items():
        package_python(bundle, tmp_path / name)

    def probe(name):
        body = json.loads((tmp_path / name / name / "probe.json").read_text())
        return server.get(f"/v2/models/{name}/infer", body)[0]

    with running(tmp_path / "log", tmp_path / "one", tmp_path / "other") as server:
        assert {name: probe(name) for name in bundles} == {"one": 200, "other": 200}
        stubs = server.stubs()
        os.kill(stubs["one"], signal.SIGKILL)
        exercise("dead", server, bundle=bundles["one"], model="one")
        assert {path: server.get(path)[0] for path in ("/v2/health/ready", "/v2/models/one/ready")} == {
            "/v2/health/ready": 200,
            "/v2/models/one/ready": 200,
        }
        assert probe("one") != 200
        assert probe("other") == 200
        time.sleep(2)  # until the answer is taken: a kill before that may leave a process (docs/serving-reference.md)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        exercise("unreachable", server, bundle=bundles["other"], model="other")
        until(lambda: not runs(stubs["other"]))
    with running(tmp_path / "log", tmp_path / "other") as server:
        body = json.loads((tmp_path / "other" / "other" / "probe.json").read_text())
        body["parameters"] = {"sequence_id": 1}
        code, said = server.get("/v2/models/other/infer", body)
        assert (code, b"START flag" in said) == (400, True), said


def test_numpy_2_is_refused_in_the_log(tmp_path):
    """This server was made for NumPy 1: with 2 every request would be misread without a word."""
    package_python(counting().write(tmp_path / "one.txl"), tmp_path / "models")
    site = Path(np.__file__).parents[1]
    assert int(np.__version__.partition(".")[0]) >= 2
    with running(tmp_path / "log", tmp_path / "models", site=str(site)) as server:
        assert not server.ready()
        assert f"NumPy {np.__version__} and this server misread each other's arrays" in server.text()
