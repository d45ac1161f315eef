"""Run the items of the GPU check, each in a process of its own that writes its steps to a file as they end.

`plan` returns the items of a first contact with a machine, or the items of the engines that --engine names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from gpu_journal import ENDED, FAILED, NOT_RUN, OK, Found, read_found
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device.choosing import DEVICES, NO_GPU, missing
from txl_runtime.device.gpu import gpu_name
from txl_runtime.errors import TxlError

__all__ = ["PRESENT", "Item", "Outcome", "Runner", "plan", "target_of"]

HERE = Path(__file__).parent
WORKER = HERE / "gpu_worker.py"
CARRIED = HERE / "bundles"
"""The folder of the tiny bundles for --quick and a first contact; engines are built into copies. A README there says
how the bundles are made anew."""
STEPS = {
    "export": ("export",),
    "torch": ("open", "decode", "draw", "score"),
    "engine": ("build", "open", "self-test", "verify", "decode", "draw", "score"),
}
"""The names of the steps of each kind of item, in the order in which they run."""
PRESENT = "it was there"
"""The reason of an export that was not run because its bundle exists."""
INTERPRETER = ("torch", "onnx", "onnxruntime", "safetensors")
"""Packages that PyTorch's interpretation of a bundle needs, with ONNX Runtime on the CPU for comparison."""
EXPORT = (*INTERPRETER, "onnx_ir", "onnxscript", "filelock")
SANITIZER = "compute-sanitizer"
SANITIZERS = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
"""The folders in which compute-sanitizer is searched for."""
REFUSED = 9
"""The exit status of compute-sanitizer if it found errors."""
PATIENCE = 5.0
"""Seconds that a process has to end after a signal; then it is killed."""
SHOWN = 4000
"""The number of last characters of a process's output that are shown; the log file has all."""


@dataclass(frozen=True)
class Item:
    """An item of the check, which is run as one process.

    Attributes:
        kind: a key of `STEPS`, or "program" for a script beside this file, which names its own steps.
        engine: the engine that is run; "" for an export or a program.
        precision, batch: the bundle's precision and batch size.
        bundle: the bundle's folder.
        title: the title of a program; "" for other items.
        command: the command of a program: the script and its options.
        limit: the seconds that the process may take; None for no limit.
        needs: packages that the process imports.
        behind: True if the process starts at the beginning, beside the items that come before this one.
    """

    kind: str
    engine: str
    precision: str
    batch: int
    bundle: Path
    title: str = ""
    command: tuple[str, ...] = ()
    limit: float | None = None
    needs: tuple[str, ...] = ()
    behind: bool = False

    @property
    def name(self) -> str:
        """The name of the item and of the file of its steps, e.g. "rtx-fp32-b1"."""
        return self.title or f"{self.engine or self.kind}-{self.precision}-b{self.batch}"


@dataclass
class Outcome:
    """The steps of an item's process, or the reason why the item was not run."""

    item: Item
    found: list[Found] = field(default_factory=list)
    reason: str = ""

    def step(self, name: str) -> Found | None:
        """Return the step of this name; None if the item has no such step."""
        return next((result for result in self.found if result.name == name), None)


def plan(given: argparse.Namespace) -> list[Item]:
    """Return all items in order: small batches first, and each export before the items that run it.

    Raises:
        TxlError: the path of --bundle is no bundle.
    """
    if given.first:
        return _first_contact(given.bundles or given.out / "bundles")
    if given.bundle is not None:
        m = open_bundle(given.bundle, verify_files=False).manifest
        named = [] if given.prepare else given.engine
        return [_item(engine, m.precision, m.batch_size, given.bundle) for engine in named]
    folder = given.bundles or given.out / "bundles"
    items: list[Item] = []
    for batch in [2] if given.quick else given.batch:
        for precision in given.precision:
            size = f"{'quick-' if given.quick else ''}v{given.vocabulary}"
            size += f"-m{given.memory}" if given.memory != 640 else ""
            # each update rule gets a bundle of its own, because verify takes the best rule that a bundle has engines of
            rule = f"-{given.update}" if given.update else ""
            bundle = folder / f"{size}-{precision}-b{batch}{rule}.txl"  # carried bundles have names of this form
            items.append(Item("export", "", precision, batch, bundle, needs=EXPORT))
            if not given.prepare:
                items += [_item(engine, precision, batch, bundle) for engine in given.engine]
    return items


def _first_contact(folder: Path) -> list[Item]:
    """Return the items of a first contact, the most telling ones first; their limits add up to under ten minutes.

    The export of the large model takes minutes, so it runs beside the first items.
    """
    tiny = {precision: folder / f"quick-v204-{precision}-b2.txl" for precision in ("fp32", "fp16")}
    fp32, fp16 = map(str, tiny.values())
    exercise = ("gpu_exercise.py", "--backend", "torch", "--threads", "4", "--bundle")
    checked = (SANITIZER, "--error-exitcode", str(REFUSED), *exercise, fp32, "--steps", "30")

    def program(title: str, limit: float, *command: str, needs: tuple[str, ...] = ()) -> Item:
        bundle = tiny["fp16" if fp16 in command else "fp32"]
        return Item("program", "", "", 2, bundle, title, command, limit, needs)

    def large(kind: str, engine: str, limit: float | None, behind: bool = False) -> Item:
        needs = () if kind == "engine" else EXPORT
        return Item(kind, engine, "fp32", 1, folder / "v204-fp32-b1.txl", "", (), limit, needs, behind)

    return [
        program("smoke", 40, "gpu_smoke.py"),
        program("exercise", 50, *exercise, fp32, needs=INTERPRETER),
        program("exercise-fp16", 40, *exercise, fp16, "--steps", "100", needs=INTERPRETER),
        program("sanitizer", 60, *checked, needs=INTERPRETER),
        program("host", 30, "gpu_costs.py", "host", "--bundle", fp32, needs=("safetensors",)),
        program("nodes", 20, "gpu_costs.py", "nodes"),
        large("export", "", 120, behind=True),
        large("engine", "rtx", 50),
        *(large("engine", engine, 25) for engine in ("rtx-alone", "cuda")),
        large("torch", "torch", 45),
        large("torch", "torch-compiled", None),  # without a limit: the last item may use the rest of the budget
    ]


def target_of(engine: str) -> str:
    """Return the backend of a variant of an engine, e.g. "rtx" for "rtx-alone"."""
    return engine.partition("-")[0]


def _item(engine: str, precision: str, batch: int, bundle: Path) -> Item:
    return Item("torch" if engine.startswith("torch") else "engine", engine, precision, batch, bundle)


class Runner:
    """A runner of items, one after the other.

    Args:
        given: the options of the command line.
        environment: the environment variables of the processes.

    Attributes:
        outcomes: the outcomes of all items so far.
    """

    def __init__(self, given: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self._given, self._environment = given, dict(environment)
        self._deadline = None if given.budget is None else time.monotonic() + given.budget
        self._left = plan(given)
        self._behind: dict[Item, subprocess.Popen[bytes]] = {}
        self.outcomes: list[Outcome] = []

    def begin(self) -> None:
        """Start the processes of all items that run beside earlier items."""
        self._behind = {item: self._start(item) for item in self._left if item.behind and not self._obstacle(item)}

    def run(self, item: Item) -> Outcome:
        """Run an item and return its outcome; if something prevents it, the outcome has the reason.

        Raises:
            KeyboardInterrupt: somebody stops the check; `outcomes` has the steps so far.
        """
        outcome = Outcome(item)
        self.outcomes.append(outcome)
        self._left.remove(item)
        outcome.reason = "" if item in self._behind else self._obstacle(item)
        if not outcome.reason:
            self._process(outcome)
        return outcome

    def leave_out(self, reason: str) -> None:
        """End all processes, and note for each remaining item that it was not run for this reason."""
        for process in self._behind.values():
            _end(process, signal.SIGTERM)
        self.outcomes += [Outcome(item, reason=reason) for item in self._left]
        self._left = []

    def _obstacle(self, item: Item) -> str:
        """Return the reason why an item cannot be run, e.g. a missing package; "" if it can."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return self._spent
        if not self._given.prepare:
            try:
                self._copy(item.bundle)
            except OSError as error:
                return f"its bundle cannot be copied ({error.strerror or error})"
        if item.kind == "export":
            without = gpu_name() is None and "cpu" not in self._given.engine and not self._given.prepare
            if without or item.bundle.exists():
                return NO_GPU if without else PRESENT
        elif item.engine != "cpu" and gpu_name() is None:
            return NO_GPU
        if absent := [name.replace("_", "-") for name in item.needs if find_spec(name) is None]:
            return f"it needs {', '.join(absent)}; put what is missing into --site"
        if item.command[:1] == (SANITIZER,) and shutil.which(SANITIZER, path=SANITIZERS) is None:
            return f"{SANITIZER} is neither on PATH nor in /usr/local/cuda/bin; it comes with CUDA's compiler"
        exported = next(
            (other for other in self.outcomes if other.item.kind == "export" and other.item.bundle == item.bundle), None
        )
        if exported is not None and not self._given.first and any(step.state != OK for step in exported.found):
            return "its bundle was not exported"
        target = target_of(item.engine)
        if item.kind == "engine" and target in DEVICES:
            if not item.bundle.exists():
                return "its bundle was not exported"
            try:
                return missing(target, open_bundle(item.bundle, verify_files=False), built=True)
            except TxlError as error:
                return str(error)
        return ""

    def _copy(self, bundle: Path) -> None:
        """Copy a bundle of `CARRIED` to the path of an item's bundle, where engines are built into the copy."""
        carried = CARRIED / bundle.name
        if carried.is_dir() and not bundle.exists():
            bundle.parent.mkdir(parents=True, exist_ok=True)
            # the copy is renamed once it is whole, so that no half copy has the bundle's name
            with tempfile.TemporaryDirectory(dir=bundle.parent) as folder:
                shutil.copytree(carried, Path(folder) / bundle.name).rename(bundle)

    @property
    def _spent(self) -> str:
        return f"the budget of {self._given.budget:g} s was spent"

    def _limit(self, item: Item) -> float | None:
        """Return an item's limit in seconds; None for no limit.

        `rtx`, whose kernels may take long to build, also gets the seconds of later items that cannot run.
        """
        if item.engine != "rtx" or item.limit is None:
            return item.limit
        return item.limit + sum(other.limit or 0 for other in self._left if other != item and self._obstacle(other))

    def _late(self, item: Item) -> str:
        return f"stopped: it took longer than {self._limit(item):g} s"

    def _steps(self, item: Item) -> Path:
        """Return the file to which an item's process writes its steps."""
        folder: Path = self._given.out / "steps"
        script = next((Path(word).stem for word in item.command if word.endswith(".py")), "")
        return folder / item.name / f"{script}.jsonl" if script else folder / f"{item.name}.jsonl"

    def _start(self, item: Item) -> subprocess.Popen[bytes]:
        """Start an item's process in a process group of its own, so that its children can be ended with it.

        Ctrl-C then reaches only this process, which passes it on.
        """
        given, steps = self._given, self._steps(item)
        steps.unlink(missing_ok=True)
        steps.parent.mkdir(parents=True, exist_ok=True)
        if item.kind == "program":
            words = ((sys.executable, HERE / word) if word.endswith(".py") else (word,) for word in item.command)
            command: list[object] = [part for parts in words for part in parts]
            if command[0] == SANITIZER:
                command[0] = shutil.which(SANITIZER, path=SANITIZERS) or SANITIZER
            command += ["--out", steps.parent]
        else:
            command = [sys.executable, WORKER, item.kind, "--bundle", item.bundle, "--name", item.name]
            command += ["--engine", item.engine or "none", "--out", steps.parent]
            command += ["--vocabulary", given.vocabulary, "--memory", given.memory]
            # 0 segments: a first contact has no time for a verification
            command += ["--segments", 0 if given.first else given.segments]
            command += ["--seconds", given.seconds, "--update", given.update or "none"]
            command += ["--precision", item.precision, "--batch", item.batch, *(["--quick"] if given.quick else [])]
            spent = "" if given.budget is None else f"stopped: {self._spent}"
            command += ["--stopped", self._late(item) if item.limit else spent]
        print(f"--- {item.name}", file=sys.stderr, flush=True)
        with (given.out / "steps" / f"{item.name}.log").open("wb") as log:
            return subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=os.name == "posix",
            )

    def _process(self, outcome: Outcome) -> None:
        item, ended = outcome.item, ""
        limit = self._limit(item)
        process = self._behind.pop(item, None) or self._start(item)
        try:
            rest = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.1)
            code = process.wait(min((each for each in (rest, limit) if each is not None), default=None))
            ended = "" if code == 0 else f"the process ended with {_status_words(code)}"
            if code == REFUSED and item.command[:1] == (SANITIZER,):
                ended += f": {SANITIZER} found errors, which stand in the log"
        except subprocess.TimeoutExpired:
            _end(process, signal.SIGTERM)
            own = limit is not None and (rest is None or limit < rest)
            ended = self._late(item) if own else f"stopped: {self._spent}"
        except KeyboardInterrupt:
            _end(process, signal.SIGINT)
            ended = "interrupted"
            raise
        finally:
            _kill(process)  # children of the ended process may still run
            outcome.found = whole(item, read_found(self._steps(item)), ended)
            log = self._given.out / "steps" / f"{item.name}.log"
            print(log.read_text(errors="replace")[-SHOWN:], end="", file=sys.stderr, flush=True)


def whole(item: Item, found: Sequence[Found], ended: str) -> list[Found]:
    """Return all steps of an item: the noted steps, and the missing steps with the end of the process as the reason.

    Args:
        item: the item.
        found: the noted steps.
        ended: how the process ended, in words; "" if it ended well.
    """
    failed, steps = ended.startswith("the process ended"), list(found)
    if item.kind == "program":
        names = any(step.state in (FAILED, ENDED) for step in steps)  # such a step explains the exit status already
        if ended and not names:
            steps.append(Found(item.name, FAILED if failed else ENDED, reason=ended))
        elif not steps:
            steps.append(Found(item.name, FAILED, reason="the process ended well and noted nothing"))
        return steps
    noted, steps = {step.name: step for step in found}, []
    begun = not any(step.state == ENDED for step in found)
    for name in STEPS[item.kind]:
        if name in noted:
            steps.append(noted[name])
            continue
        state = NOT_RUN if not (begun and ended) else FAILED if failed else ENDED
        steps.append(Found(name, state, reason=ended or "the process did not come to it"))
        begun = False  # only the first step without a note had begun when the process ended
        ended = "the process had ended" if failed else ended
    return steps


def _end(process: subprocess.Popen[bytes], request: signal.Signals) -> None:
    """Send a signal to a process of this check and its children, wait `PATIENCE` seconds, and then kill them.

    A process that hangs in the driver may outlive even that; this function does not wait for its end.
    """
    for asked in (request, getattr(signal, "SIGKILL", signal.SIGTERM)):
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                if os.name == "posix":
                    os.killpg(process.pid, asked)
                # Windows itself sends Ctrl-C to all processes of a console, and no process can send it
                elif asked != signal.SIGINT:
                    process.terminate()
                process.wait(PATIENCE)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a process's group; children may outlive the process itself."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _status_words(code: int) -> str:
    """Return an exit status in words, e.g. "code 1" or "signal SIGKILL"."""
    if code >= 0:
        return f"code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
