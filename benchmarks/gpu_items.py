"""What the GPU check runs, item by item: each is a process of its own that writes its steps down as it goes."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_journal import FAILED, NOT_RUN, OK, Found, read_found
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.choosing import DEVICES, NO_GPU, missing
from txl_runtime.device.gpu import gpu_name
from txl_runtime.errors import TxlError

__all__ = ["PRESENT", "Item", "Outcome", "Runner", "plan"]

WORKER = Path(__file__).with_name("gpu_worker.py")
STEPS = {
    "export": ("export",),
    "torch": ("open", "decode", "draw", "score"),
    "engine": ("build", "open", "self-test", "verify", "decode", "draw", "score"),
}
"""What each kind of item does, in this order."""
PRESENT = "it was there"
"""Why a bundle is not exported."""
STDERR = 2
"""Where processes write what people read."""
PATIENCE, TOLD = 20.0, 2.0
"""Seconds that a process has to end in when it is asked to, and that it has first where it may know already."""


@dataclass(frozen=True)
class Item:
    """One process.

    Attributes:
        kind: of `STEPS`.
        engine: what runs, "" for an export.
        precision, batch: of the bundle.
        bundle: its folder.
    """

    kind: str
    engine: str
    precision: str
    batch: int
    bundle: Path

    @property
    def name(self) -> str:
        """Of its result file too."""
        return f"{self.engine or self.kind}-{self.precision}-b{self.batch}"


@dataclass
class Outcome:
    """What came of an item; of one that had no process, only a reason."""

    item: Item
    found: list[Found] = field(default_factory=list)
    reason: str = ""

    def step(self, name: str) -> Found | None:
        """One of its steps."""
        return next((found for found in self.found if found.name == name), None)


def plan(given: argparse.Namespace) -> list[Item]:
    """All items in their order: small batches first, and what is exported before what runs it.

    Raises:
        TxlError: the bundle that was given is none.
    """
    if given.bundle is not None:
        m = open_bundle(given.bundle, verify_files=False).manifest
        named = [] if given.prepare else given.engine
        return [_item(engine, m.precision, m.batch_size, given.bundle) for engine in named]
    folder = given.bundles or given.out / "bundles"
    items: list[Item] = []
    for batch in [2] if given.quick else given.batch:
        for precision in given.precision:
            size = f"{'quick-' if given.quick else ''}v{given.vocabulary}"
            rule = f"-{given.update}" if given.update else ""  # a bundle of its own, for verify takes the best there is
            bundle = folder / f"{size}-{precision}-b{batch}{rule}.txl"
            items.append(Item("export", "", precision, batch, bundle))
            if not given.prepare:
                items += [_item(engine, precision, batch, bundle) for engine in given.engine]
    return items


def _item(engine: str, precision: str, batch: int, bundle: Path) -> Item:
    return Item("torch" if engine.startswith("torch") else "engine", engine, precision, batch, bundle)


class Runner:
    """Runs items one after the other.

    Args:
        given: the options.
        environment: of the processes.

    Attributes:
        outcomes: of all items so far.
    """

    def __init__(self, given: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self._given, self._environment = given, dict(environment)
        self._deadline = None if given.budget is None else time.monotonic() + given.budget
        self._left = plan(given)
        self.outcomes: list[Outcome] = []

    def run(self, item: Item) -> Outcome:
        """Run an item, unless there is a reason not to.

        Raises:
            KeyboardInterrupt: somebody stops the check; the outcome so far is kept.
        """
        outcome = Outcome(item)
        self.outcomes.append(outcome)
        self._left.remove(item)
        outcome.reason = self._obstacle(item)
        if not outcome.reason:
            self._process(outcome)
        return outcome

    def leave_out(self, reason: str) -> None:
        """Note that the items that are left are not run."""
        self.outcomes += [Outcome(item, reason=reason) for item in self._left]
        self._left = []

    def _obstacle(self, item: Item) -> str:
        """Why an item is not run; empty where it is."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"the budget of {self._given.budget:g} s was spent"
        if item.kind == "export":
            without = gpu_name() is None and set(self._given.engine).isdisjoint({"cpu"}) and not self._given.prepare
            return NO_GPU if without else "" if not item.bundle.exists() else PRESENT
        if item.engine != "cpu" and gpu_name() is None:
            return NO_GPU
        exported = next(
            (other for other in self.outcomes if other.item.kind == "export" and other.item.bundle == item.bundle), None
        )
        if exported is not None and any(found.state != OK for found in exported.found):
            return "its bundle was not exported"
        if item.kind == "engine" and item.engine in DEVICES:
            try:
                return missing(item.engine, open_bundle(item.bundle, verify_files=False), built=True)
            except TxlError as error:
                return str(error)
        return ""

    def _process(self, outcome: Outcome) -> None:
        item, given = outcome.item, self._given
        folder = given.out / "steps"
        (folder / f"{item.name}.jsonl").unlink(missing_ok=True)
        command: list[object] = [sys.executable, WORKER, item.kind, "--bundle", item.bundle, "--name", item.name]
        command += ["--engine", item.engine or "none", "--out", folder]
        command += ["--segments", given.segments, "--seconds", given.seconds, "--update", given.update or "none"]
        if item.kind == "export":
            command += ["--precision", item.precision, "--batch", item.batch, *(["--quick"] if given.quick else [])]
            command += ["--vocabulary", given.vocabulary]
        spent = "" if given.budget is None else f"stopped: the budget of {given.budget:g} s was spent"
        command += ["--stopped", spent]
        ended = ""
        process = subprocess.Popen([str(part) for part in command], stdout=STDERR, env=self._environment)
        try:
            rest = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.1)
            code = process.wait(rest)
            ended = "" if code == 0 else f"the process ended with {_said(code)}"
        except subprocess.TimeoutExpired:
            _end(process, signal.SIGTERM)
            ended = spent
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a terminal tells it too, and it has a step to note
                process.wait(TOLD)
            _end(process, signal.SIGINT)
            ended = "interrupted"
            raise
        finally:
            outcome.found = whole(item, read_found(folder / f"{item.name}.jsonl"), ended)


def whole(item: Item, found: Sequence[Found], ended: str) -> list[Found]:
    """All steps of an item: those that it noted, and the others with what became of the process."""
    noted = {step.name: step for step in found}
    steps: list[Found] = []
    failed = ended.startswith("the process ended")
    for name in STEPS[item.kind]:
        if name in noted:
            steps.append(noted[name])
            continue
        state = FAILED if failed else NOT_RUN
        steps.append(Found(name, state, reason=ended or "the process did not come to it"))
        failed = False  # the first of them ended it
        ended = ended if ended and not ended.startswith("the process ended") else "the process had ended"
    return steps


def _end(process: subprocess.Popen[bytes], request: signal.Signals) -> None:
    """Ask a process of this check to end, and end it where it does not."""
    if process.poll() is not None:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.send_signal(request)
        process.wait(PATIENCE)
        return
    process.kill()
    process.wait()


def _said(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
