"""The session in which an id's requests go on."""

from __future__ import annotations

from txl_deploy.triton.inside import conversations
from txl_deploy.triton.inside.conversations import Conversations


class Sessions(set):
    """Names of sessions."""

    close = set.remove


def asked(made, sessions, name, start=False):
    session = made.session_of(name, start)
    sessions.add(session)
    return session


def test_an_id_keeps_its_session_until_start_or_end():
    sessions = Sessions()
    made = Conversations(sessions)
    first = asked(made, sessions, "id 7")
    assert asked(made, sessions, "id 7") == first != asked(made, sessions, "name 7")
    made.end("id 7")
    second = asked(made, sessions, "id 7")
    made.close_ended([first])
    assert {first, second} <= sessions
    made.close_ended([second])
    assert first not in sessions
    third = asked(made, sessions, "id 7", start=True)
    assert len({first, second, third}) == 3
    assert second not in sessions


def test_a_session_that_expired_is_no_more_gone_on_with():
    sessions = Sessions()
    made = Conversations(sessions)
    first = asked(made, sessions, "id 7")
    sessions.clear()
    assert made.session_of("id 7", False) != first


def test_ids_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(conversations, "ROOM", 10)
    sessions = Sessions()
    made = Conversations(sessions)
    kept = asked(made, sessions, "kept")
    for number in range(100):
        made.session_of(str(number), False)
    assert len(made._current) <= 10
    assert made.session_of("kept", False) == kept
