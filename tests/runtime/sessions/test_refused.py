"""Requests that no session does are refused at once, by name."""

from __future__ import annotations

import pytest
from sessions_alone import drawn, run
from txl_runtime import UsageError
from txl_runtime.sessions import Finished, Limits, Request, Sampling, Sessions

# --- what is refused ----------------------------------------------------------------------------------------------


def test_models_whose_sequences_are_not_independent(model_of):
    with pytest.raises(UsageError, match="this model's sequences influence one another"):
        Sessions(model_of("joint"))
    with pytest.raises(UsageError, match="rows are 2, expected 1, because this model's sequences run in lockstep"):
        Sessions(model_of("lockstep"), rows=2)


@pytest.mark.parametrize("rows", [0, 4, 1.5, True, "2", [1]])
def test_rows_that_there_are_not(model_of, rows):
    with pytest.raises(UsageError, match=r"rows are .*, expected 1 … 3; export with --batch-size for more"):
        Sessions(model_of("counting"), rows=rows)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (5, "limits are 5, expected Limits"),
        (Limits(sessions=0), "limit sessions is 0, expected a whole number of at least 1"),
        (Limits(waiting=-1), "limit waiting is -1, expected a whole number of at least 0"),
        (Limits(host_bytes=1.5), "limit host_bytes is 1.5"),
        (Limits(idle_seconds=0), "limit idle_seconds is 0, expected a number above 0"),
        (Limits(idle_seconds=float("nan")), "limit idle_seconds is nan"),
    ],
)
def test_limits_that_make_no_sense(model_of, limits, said):
    with pytest.raises(UsageError, match=said):
        Sessions(model_of("counting"), limits=limits)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("text", "the request is a str, expected Request"),
        (Request(), "the request has no tokens and its session none that was drawn, expected at least one token"),
        (Request([]), "the request has no tokens"),
        (Request([11]), r"tokens hold id 11 at \[0, 0\], expected 0 … 10"),
        (Request([-1]), "tokens hold id -1"),
        (Request([[1]]), r"tokens have shape \[1, 1\], expected \[T\]"),
        (Request([1.5]), "tokens are float64, expected whole numbers"),
        (Request(["x" * 10**7, *[""] * 10**5]), "tokens hold 'xxx.*expected whole numbers; encode text"),
        (Request([1] * ((1 << 20) + 1)), "the request has 1048577 tokens, expected at most 1048576 positions"),
        (Request("text"), "tokens hold 'text', expected whole numbers; encode text with model.vocabulary.encode"),
        (Request([1], -1), "max_new_tokens is -1, expected a whole number of at least 0"),
        (Request([1], 1 << 20), "asks for 1048576 more, expected at most 1048576 positions"),
        (Request([1], True), "max_new_tokens is True"),
        (Request([1], 1, Sampling(-1)), "temperature is -1, expected a number of at least 0"),
        (Request([1], 1, Sampling(top_p=2)), "top_p is 2, expected more than 0 and at most 1"),
        (Request([1], 1, Sampling(seed=-1)), "seed is -1"),
        (Request([1], 1, Sampling(sequence=-1)), "sampling's sequence is -1"),
        (Request([1], 1, Sampling(forbid=[11])), r"forbid is \[11\], expected a list of ids, 0 … 10 each"),
        (Request([1], 1, Sampling(forbid=iter([1]))), r"sampling's forbid is <.*>, which is read once"),
        (Request([1], 1, Sampling(allow=iter([1]))), r"sampling's allow is <.*>, which is read once"),
        (Request([1], 1, Sampling(logit_bias={1: 101})), "logit_bias is 101 for token 1, expected a number"),
        (Request([1], 1, {"seed": 1}), "sampling is {'seed': 1}, expected Sampling"),
        (Request([1], 1, stop_tokens=[99]), "99"),
        (Request([1], 1, until=3), "until is 3, expected a function of a token, or None"),
        (Request([1], top_logprobs=-1), "top_logprobs is -1, expected None or a whole number"),
        (Request([1], score="yes"), "score is 'yes', expected True or False"),
        (Request([1], last=True), "a request of tokens has last, expected inputs with it"),
        (Request(last="yes", inputs={"tokens": [[1]]}), "last is 'yes', expected True or False"),
        (Request([1], seconds=0), "seconds are 0, expected a number above 0, or None for no limit"),
        (Request([1], seconds=10**400), "expected a number above 0"),
        (Request(inputs={}), "inputs lack tokens"),
        (Request([1], inputs={"tokens": [[1]]}), "a request of inputs has tokens, expected inputs alone"),
        (Request(max_new_tokens=1, inputs={"tokens": [[1]]}), "a request of inputs has max_new_tokens"),
        (Request(inputs={"tokens": [[1], [2]]}), r"tokens has shape \[2, 1\], expected \[1, 1\]"),
    ],
)  # fmt: skip
def test_requests_that_are_refused_at_once(model_of, request_, said):
    with Sessions(model_of("counting")) as sessions:
        with pytest.raises(UsageError, match=said):
            sessions.submit(request_, "anna")
        assert "anna" not in sessions
        assert not sessions.round()


def test_a_name_is_text(model_of):
    with Sessions(model_of("counting")) as sessions:
        with pytest.raises(UsageError, match="the session's name is"):
            sessions.submit(Request([1]), "")
        with pytest.raises(UsageError, match="unread is 0, expected a whole number of at least 1"):
            sessions.submit(Request([1]), unread=0)
        with pytest.raises(UsageError, match="no session is named 'nobody'"):
            sessions.info("nobody")


def test_what_a_model_without_log_probabilities_cannot_do(model_of):
    said = "takes token ids alone, but this model reads obs"
    with Sessions(model_of("recurrent")) as sessions, pytest.raises(UsageError, match=said):
        sessions.submit(Request([1]))
    with Sessions(model_of("fours")) as sessions:
        with pytest.raises(UsageError, match=r"of which 1 remain after segments"):
            sessions.submit(Request([1] * 5))
        with pytest.raises(UsageError, match="a token is fed alone after it was drawn, but this model"):
            sessions.submit(Request([1] * 4, 1))


def test_a_request_that_waits_is_checked_when_its_turn_comes(model_of):
    with Sessions(model_of("counting")) as sessions:
        sessions.submit(Request([1]), "anna")
        late = sessions.submit(Request(max_new_tokens=2), "anna")
        run(sessions)
        assert late.events() == [Finished("error", 0)]
        assert "the request has no tokens and its session none that was drawn" in str(late.error)
        sessions.submit(Request([1], 1), "anna")
        fine = sessions.submit(Request(max_new_tokens=2), "anna")
        run(sessions)
        assert len(drawn(fine)) == 2
