"""Whether the model computes what the reference computed: looked at now and then, not always."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest

EVERY = 60.0
"""Seconds for which a self-test stays good; it takes as long as some requests do."""


class Health:
    """The last self-test, and when it was."""

    def __init__(self, model: Model) -> None:
        self._model, self._lock = model, asyncio.Lock()
        self._when, self._problem = -EVERY, ""
        self._facts: dict[str, Any] = {}

    async def problem(self) -> str:
        """What is wrong, or nothing; the vectors are replayed where the last time is too long ago."""
        async with self._lock:  # those who come meanwhile get the same result
            if time.monotonic() - self._when >= EVERY:
                self._problem, self._facts = await asyncio.to_thread(_replay, self._model)
                self._when = time.monotonic()
            return self._problem

    def facts(self) -> dict[str, Any]:
        """What the last self-test reached, and how many seconds ago that was."""
        return {**self._facts, "seconds_ago": round(time.monotonic() - self._when, 3)}


def _replay(model: Model) -> tuple[str, dict[str, Any]]:
    try:
        result = run_selftest(model)
        facts = {"steps": result.steps, "largest": dict(result.largest), "limits": dict(result.limits)}
        result.require()
        return "", facts
    except TxlError as error:
        return str(error), {}
