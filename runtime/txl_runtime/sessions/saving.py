"""A checkpoint of sessions that go on beside it: states are copied between rounds, and written by another thread."""

from __future__ import annotations

import asyncio
from functools import partial

from txl_runtime.errors import TxlError
from txl_runtime.sessions.asynchronous import AsyncSessions
from txl_runtime.sessions.checkpoint import Checkpoint
from txl_runtime.sessions.core import Sessions


async def save_beside(front: AsyncSessions, checkpoint: Checkpoint) -> int:
    """Save all sessions while they go on: a round waits for the copy of one state at most.

    Where this is cancelled, the save ends at the next session, and what is there is the last checkpoint. It returns
    only then, so that another save may begin.

    Args:
        front: of the sessions.
        checkpoint: where to. One save at a time.

    Returns:
        How many states were written.

    Raises:
        TxlError: the disk does not take them; what is there is the last checkpoint, whole.
    """
    cancelled = False

    def save() -> int:
        with checkpoint.begin(front.post(Sessions.versions).result()) as saving:
            for name in saving.wanted:
                if cancelled:
                    return 0
                try:
                    state = front.post(partial(Sessions.take, name=name)).result()
                except TxlError:  # it is closed by now, or its own disk has lost it
                    continue
                saving.add(name, state)
            return saving.finish()

    work = asyncio.ensure_future(asyncio.to_thread(save))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancelled = True
        await asyncio.wait([work])
        raise
