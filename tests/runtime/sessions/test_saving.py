"""A checkpoint beside sessions that go on: whole, of every session, and waited for when it is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest
from txl_runtime import TxlError
from txl_runtime.sessions import AsyncSessions, Request, Sessions
from txl_runtime.sessions import checkpoint as checkpoint_module
from txl_runtime.sessions.asynchronous import save_beside
from txl_runtime.sessions.checkpoint import Checkpoint


@pytest.fixture
def model(model_of):
    return model_of("counting")


def test_sessions_go_on_while_they_are_saved(model, tmp_path):
    async def main(checkpoint: Checkpoint) -> list[int]:
        sessions, written = Sessions(model, 2), []
        async with AsyncSessions(sessions) as front:

            async def ask(number: int) -> None:
                for _ in range(5):
                    async for _ in front.run(Request([number] * 9, 3), f"s{number}"):
                        pass

            asking = asyncio.gather(*(ask(number) for number in range(6)))
            while not asking.done():
                written.append(await save_beside(front, checkpoint))
            await asking
            written.append(await save_beside(front, checkpoint))
            assert await save_beside(front, checkpoint) == 0
            states = {name: await front.call(lambda core, name=name: core.take(name)) for name in sessions.names()}
        assert sorted(checkpoint.names) == sorted(states)
        for name, state in states.items():
            saved = checkpoint.load(name)
            assert (saved.pending, saved.seen) == (state.pending, state.seen)
            assert saved.state.states["seen"].tobytes() == state.state.states["seen"].tobytes()
        return written

    with Checkpoint(tmp_path, model.manifest.model_id) as checkpoint:
        assert sum(asyncio.run(main(checkpoint))) >= 6


def test_one_that_is_cancelled_ends_before_the_next_begins(model, tmp_path, monkeypatch):
    write, begun, go_on = checkpoint_module.write_private, threading.Event(), threading.Event()

    def slow(path, data):
        begun.set()
        assert go_on.wait(20)
        write(path, data)

    async def main(checkpoint: Checkpoint) -> None:
        sessions = Sessions(model, 2)
        async with AsyncSessions(sessions) as front:
            for name in "abc":
                async for _ in front.run(Request([1, 2]), name):
                    pass
            monkeypatch.setattr(checkpoint_module, "write_private", slow)
            saving = asyncio.create_task(save_beside(front, checkpoint))
            await asyncio.to_thread(begun.wait, 20)
            saving.cancel()
            await asyncio.sleep(0.05)
            assert not saving.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await saving
            assert not list(tmp_path.glob("*.session"))
        assert checkpoint.save(sessions) == 3

    with Checkpoint(tmp_path, model.manifest.model_id) as checkpoint:
        asyncio.run(main(checkpoint))


def test_a_full_disk_is_told_and_the_sessions_go_on(model, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    async def main(checkpoint: Checkpoint) -> None:
        async with AsyncSessions(Sessions(model, 2)) as front:
            async for _ in front.run(Request([1, 2]), "anna"):
                pass
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint_module, "write_private", full)
                with pytest.raises(TxlError, match="No space left on device"):
                    await save_beside(front, checkpoint)
            async for _ in front.run(Request([1, 2]), "anna"):
                pass
            assert await save_beside(front, checkpoint) == 1

    with Checkpoint(tmp_path, model.manifest.model_id) as checkpoint:
        asyncio.run(main(checkpoint))
