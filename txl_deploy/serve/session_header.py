"""Take a request's session from the header X-Session, by which a proxy keeps sessions apart."""

from __future__ import annotations

from starlette.datastructures import Headers
from txl_runtime.streaming.checks import shown

from txl_deploy.serve.errors import ApiError
from txl_deploy.serve.settings import check_session_name

HEADER = "x-session"
"""Name of the header; its value is the session's name, in UTF-8."""


def session_of(headers: Headers, name: str | None) -> str | None:
    """Return the session that a request names in its header, in its body or address (`name`), or in both; None if in
    neither. E.g. the header "X-Session: ada" with the name None or "ada" gives "ada".

    Raises:
        ApiError: the header is there twice, or differs from `name`; a proxy may have chosen the wrong server by it.
        UsageError: this is no session's name.
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
