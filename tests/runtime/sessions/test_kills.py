"""A process that serves and saves, killed at random moments: what it saved is whole, and every session goes on.

TXL_SESSIONS_KILLS says how often; a few times are a part of the suite.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from saving_sessions import tokens_of
from txl_runtime import Model, load
from txl_runtime.sessions import Request, Sessions
from txl_runtime.sessions.checkpoint import Checkpoint

KILLS = int(os.environ.get("TXL_SESSIONS_KILLS", "10"))
CLOSE = 1e-4
MORE = 5
"""Tokens that each restored session is fed."""


def killed(bundle: Path, folder: Path, seed: int, draws: random.Random) -> list[str]:
    """Kill a process after a while; what it said."""
    tests = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [sys.executable, "-m", "saving_sessions", str(bundle), str(folder), str(seed), "1000000"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    said = []
    try:
        assert process.stdout is not None
        if draws.random() < 0.9:  # else while it starts
            said.append(process.stdout.readline())
            assert said == ["restored\n"]
        if said and draws.random() < 0.5:  # a busy machine is slow to save at all
            while not said[-1].startswith("saved"):
                said.append(process.stdout.readline())
        time.sleep(draws.random() * 0.3)
    finally:
        process.kill()
        rest, _ = process.communicate()
    return [*said, *rest.splitlines(keepends=True)]


def restored(model: Model, folder: Path) -> dict[str, int]:
    """Restore what a killed process saved, beside what each session is alone, and let all go on.

    Returns:
        How much each session was fed.
    """
    sessions, seen = Sessions(model, 3), dict[str, int]()
    with Checkpoint(folder, model.manifest.model_id) as checkpoint:
        assert checkpoint.restore(sessions) == {}
        index = folder / "sessions.json"
        listed = [one["file"] for one in json.loads(index.read_text())["sessions"]] if index.exists() else []
        assert sorted(path.name for path in folder.glob("*.session")) == sorted(listed)
    tickets, expected = {}, {}
    for name in sessions.names():
        state, alone = sessions.take(name), model.stream(1)
        tokens = tokens_of(name, state.seen + MORE, model.vocab_size)
        if state.seen:
            alone.feed(tokens[None, : state.seen])
        for layer, rows in alone.memory().items():
            np.testing.assert_allclose(state.state.memory[layer], rows, atol=CLOSE)
        seen[name] = state.seen
        rows = alone.feed(tokens[None, state.seen :])[0]
        expected[name] = rows[np.arange(MORE - 1), tokens[state.seen + 1 :]]
        tickets[name] = sessions.submit(Request(tokens[state.seen :], score=True), name)
    while sessions.round():
        pass
    for name, ticket in tickets.items():
        *events, end = ticket.events()
        assert end.reason == "length"
        np.testing.assert_allclose(np.concatenate([event.logprobs for event in events]), expected[name], atol=CLOSE)
    sessions.shut()
    return seen


@pytest.mark.slow
def test_whatever_moment_it_is_killed_at_every_session_goes_on(transformer, tmp_path):
    bundle, folder, draws = transformer, tmp_path / "saved", random.Random(0)
    model, known, count = load(bundle, "cpu", 1), dict[str, int](), Counter[str]()
    for number in range(KILLS):
        said = killed(bundle, folder, number, draws)
        looked = tmp_path / "looked at"
        shutil.rmtree(looked, ignore_errors=True)
        if folder.exists():  # what is left over stays for the next process to remove
            shutil.copytree(folder, looked)
        found = restored(model, looked)
        told = [line.split(" ", 1) for line in said if line.endswith("\n") and line.startswith("sav")]
        saved = [json.loads(what) for word, what in told if word == "saved"]
        before = saved[-1] if saved else known
        under_way = json.loads(told[-1][1]) if told and told[-1][0] == "saving" else before
        assert found in (before, under_way), f"kill {number}"
        left = len(list(folder.glob("*.session"))) - len(found)
        count["during a save" if told and told[-1][0] == "saving" else "between saves"] += 1
        count["checkpoints"] += len(saved)
        count["kills that left files over"] += left > 0
        count["kills whose save was done, though it did not say so"] += found != before
        known = found
    print(f"{KILLS} kills: {dict(count)}, {sum(known.values())} positions fed")
    assert known
    assert count["checkpoints"]
