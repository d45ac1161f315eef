"""Take a request's session from the header X-Session, by which a proxy chooses the server of a session."""

from __future__ import annotations

from starlette.datastructures import Headers
from txl_runtime.streaming.checks import shown

from txl_deploy.serve.errors import ApiError
from txl_deploy.serve.settings import check_session_name

HEADER = "x-session"
"""Name of the header; its value is the session's name, in UTF-8."""


def session_of(headers: Headers, name: str | None) -> str | None:
    """Return the name of a request's session, or None if it names no session.

    The name is in the header, in the body or address (`name`), or in both: "X-Session: ada" gives "ada" if `name` is
    None or "ada".

    Raises:
        ApiError: the header is there twice, or differs from `name`: a proxy may have chosen the wrong server by it.
        UsageError: the name is no session's name.
    """
    values = headers.getlist(HEADER)
    if len(values) > 1:
        raise ApiError(400, f"the header X-Session is there {len(values)} times, expected once; send one", "session")
    if values:
        text = values[0].encode("latin-1").decode(errors="replace")
        if name not in (None, text):
            raise ApiError(
                400,
                f"the header X-Session is {shown(text)}, expected the request's session {shown(name)}; send the same "
                "name in both",
                "session",
            )
        name = text
    return None if name is None else check_session_name(name)
