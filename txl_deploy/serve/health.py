"""Check that the model still computes the reference's results, at most once a minute."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from txl_runtime.errors import TxlError
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest

EVERY = 60.0
"""Seconds for which a self-test's result stays valid: a self-test takes as long as some requests."""


class Health:
    """The result and time of the last self-test."""

    def __init__(self, model: Model) -> None:
        self._model, self._lock = model, asyncio.Lock()
        self._when, self._problem = -EVERY, ""
        self._facts: dict[str, Any] = {}

    async def problem(self) -> str:
        """Return the fault that the last self-test found, or ""; a self-test older than `EVERY` is repeated first."""
        async with self._lock:  # requests that arrive during a self-test wait for its result
            if time.monotonic() - self._when >= EVERY:
                self._problem, self._facts = await asyncio.to_thread(_replay, self._model)
                self._when = time.monotonic()
            return self._problem

    def facts(self) -> dict[str, Any]:
        """Return the figures of the last self-test, and its age in seconds."""
        return {**self._facts, "seconds_ago": round(time.monotonic() - self._when, 3)}


def _replay(model: Model) -> tuple[str, dict[str, Any]]:
    try:
        result = run_selftest(model)
        facts = {"steps": result.steps, "largest": dict(result.largest), "limits": dict(result.limits)}
        result.require()
        return "", facts
    except TxlError as error:
        return str(error), {}
