"""`serve --lookup`: the answers of a server without drafts, in fewer rounds; refused at the start by name."""

from __future__ import annotations

import pytest
from drafting import Eager, windowed
from support import call_main
from txl_runtime.sessions import drafts

TEXT = "a = b + c; a = b + c; a = b"


@pytest.fixture(scope="module")
def window(tmp_path_factory, make_bundle):
    return windowed(
        make_bundle, tmp_path_factory.mktemp("window") / "small.txl", vocabulary=True, config={"vocab_size": 256}
    )


@pytest.fixture
def servers(serve, window, monkeypatch):
    monkeypatch.setattr(drafts, "Pace", Eager)
    return serve(window), serve(window, lookup=4)


def metric(server, name: str) -> int:
    (line,) = [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"{name}_total ")]
    return int(float(line.split()[1]))


def test_answers_are_those_without_drafts(servers):
    greedy = {"prompt": TEXT, "max_tokens": 60, "temperature": 0}
    choice, _ = (server.complete(**greedy)["choices"][0] for server in servers)
    asked = [
        greedy,
        {**greedy, "logprobs": 2, "return_token_ids": True},
        {**greedy, "stop": choice["text"][20:23]},
        {**greedy, "stop_token_ids": [choice["text"].encode()[-1]]},
        {"prompt": [TEXT, "bbbbbb"], "n": 3, "seed": 4, "temperature": 0.4, "max_tokens": 30},
        {"prompt": "x", "max_tokens": 30, "seed": 1, "logit_bias": {"97": 100}},
        {**greedy, "session": "ada"},
        {"prompt": "", "max_tokens": 20, "temperature": 0, "session": "ada"},
        {**greedy, "memory_length": 2},
    ]
    for body in asked:
        plain, drafted = (server.complete(**body) for server in servers)
        for ours, theirs in zip(drafted["choices"], plain["choices"], strict=True):
            assert (ours["text"], ours["finish_reason"]) == (theirs["text"], theirs["finish_reason"]), body
        assert drafted["usage"] == plain["usage"]
        assert drafted.get("session") == plain.get("session")
    plain, drafted = ("".join(event["choices"][0]["text"] for event in server.stream(**greedy)) for server in servers)
    assert drafted == plain == choice["text"]
    assert metric(servers[0], "txl_sessions_drafted") == 0
    assert metric(servers[1], "txl_sessions_drafted") > metric(servers[1], "txl_sessions_kept") > 100
    tokens = [metric(server, "txl_sessions_tokens") for server in servers]
    assert tokens[0] == tokens[1], "each token is counted, however many came in one round"
    rounds = [metric(server, "txl_sessions_rounds") for server in servers]
    assert rounds[1] < rounds[0]


@pytest.mark.parametrize(
    ("lookup", "said"),
    [
        (4, "lookup is 4, expected 0, because the bundle does not say that a segment is as many steps"),
        (7, "lookup is 7, expected a whole number of 0 … 4; 0 is off"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(letters, monkeypatch, capfd, lookup, said):
    code, out, err = call_main(("serve", letters, "--port", 0, "--lookup", lookup), monkeypatch, capfd)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
