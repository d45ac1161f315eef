"""Everything that writes, made to fail at every call: run as a process of its own that the failing disk is loaded into.

    python -m stand_ins.faulty_writing SCENARIO FOLDER ACTION... [--from N] [--step N]

Each case is a fork: the folder is set up, the child writes while the n-th call fails, and the parent looks at what is
there then. What it prints is one JSON document: how many cases there were, and those that went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stand_ins.disk import FAIL, KINDS, SHORT, SIGNAL, SIGNAL_AFTER, Disk
from stand_ins.power_loss import Model, put, read_diary

ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT")
ACTIONS: dict[str, tuple[int, int]] = {
    **{name: (FAIL, getattr(errno, name)) for name in ERRORS},
    "short": (SHORT, 0),
    "kill": (SIGNAL, signal.SIGKILL),
    "kill after": (SIGNAL_AFTER, signal.SIGKILL),
    "interrupt": (SIGNAL, signal.SIGINT),
    "terminate": (SIGNAL, signal.SIGTERM),
}
FINE, REFUSED, STOPPED, WRONG = 0, 42, 43, 99


@dataclass
class Scenario:
    """Something that writes.

    Attributes:
        prepare: sets up the folder before a case.
        act: writes.
        found: what is there: "old", "new", "nothing", or what is broken.
        whole: what may be found after a failure.
        again: the next run, which has to clean up.
        kept: what belongs into the folder; anything else there, or hidden below, is left over.
        quiet: whether it keeps errors to itself, since nothing is lost by them.
    """

    prepare: Callable[[], None]
    act: Callable[[], object]
    found: Callable[[], str]
    whole: set[str]
    again: Callable[[], object]
    kept: set[str] = field(default_factory=set)
    quiet: bool = False

    def verdict(self) -> str:
        """Return what is found, or that it cannot be read."""
        try:
            return self.found()
        except Exception as error:
            return f"broken: {type(error).__name__}: {error}"


# ---- a folder that looks like a bundle

NAMES = ("weights.bin", "manifest.json", "engines/rtx/a.engine")


def toy(root: Path, force: bool, exchange: bool = True) -> Scenario:
    """`publishing` alone, with three small files."""
    from txl_export.bundle import placing

    target = root / "model.txl"

    def write(folder: Path, what: str) -> None:
        (folder / "engines" / "rtx").mkdir(parents=True)
        for name in NAMES:
            (folder / name).write_text(what)

    def publish(what: str, force: bool) -> None:
        with placing.publishing(target, force) as folder:
            write(folder, what)

    def prepare() -> None:
        if force:
            target.mkdir()
            write(target, "old")

    def found() -> str:
        if not os.path.lexists(target):
            return "nothing"
        texts = {(target / name).read_text() if (target / name).is_file() else "missing" for name in NAMES}
        files = sum(path.is_file() for path in target.rglob("*"))
        return texts.pop() if len(texts) == 1 and files == len(NAMES) else f"broken: {texts}, {files} files"

    if not exchange:
        placing._exchange = lambda *_: False
    whole = {"old", "new"} if force else {"nothing", "new"}
    return Scenario(prepare, lambda: publish("new", force), found, whole, lambda: publish("new", True), {target.name})


# ---- a snapshot


def snapshot(root: Path, over: bool) -> Scenario:
    """`StreamState.save`, to a free name or over an old file."""
    import numpy as np
    from txl_runtime import StreamState

    path = root / "a.state"

    def state(value: float) -> StreamState:
        rows = {"layers.00.key": np.full((2, 5, 4), value, np.float32)}
        return StreamState("0" * 64, np.full(2, 5, np.int32), rows, np.zeros(2, np.int32))

    def found() -> str:
        if not path.exists():
            return "nothing"
        values = set(StreamState.load(path).memory["layers.00.key"].ravel().tolist())
        return {(1.0,): "old", (2.0,): "new"}.get(tuple(values), f"broken: {values}")

    old, new = state(1), state(2)
    whole = {"old", "new"} if over else {"nothing", "new"}
    prepare = (lambda: old.save(path)) if over else (lambda: None)
    return Scenario(prepare, lambda: new.save(path), found, whole, lambda: new.save(path), {path.name})


def kernels(root: Path, _: Path) -> Scenario:
    """The cache of compiled kernels, which no failure may turn into an error."""
    from txl_runtime.device.engines.opening import _Cache

    engine = SimpleNamespace(name="engines/rtx/a.engine", sidecar=SimpleNamespace(key="0" * 64))
    bundle: Any = SimpleNamespace(folder=SimpleNamespace(place=root / "model.txl"))
    path = root / "model.txl.rtx-cache" / f"a-{'0' * 16}.cache"

    def keep(data: bytes) -> None:
        cache = _Cache(bundle, engine)  # type: ignore[arg-type]
        cache.read()
        cache.keep(data, True)

    def found() -> str:
        if not path.exists():
            return "nothing"
        return {b"old": "old", b"newer": "new"}.get(path.read_bytes(), "broken")

    return Scenario(
        lambda: keep(b"old"),
        lambda: keep(b"newer"),
        found,
        {"old", "new"},
        lambda: keep(b"newer"),
        {path.parent.name},
        quiet=True,
    )


def sessions(root: Path, _: Path) -> Scenario:
    """A checkpoint of three sessions over an old one: one changed, one stayed, one is gone, one is new."""
    from plain_sessions import MODEL, PlainSessions, plain_state
    from txl_runtime.sessions.checkpoint import Checkpoint

    folder = root / "saved"

    def prepare() -> None:
        with Checkpoint(folder, MODEL) as checkpoint:
            checkpoint.save(PlainSessions(a=1, b=1, c=1))

    def act() -> None:
        with Checkpoint(folder, MODEL) as checkpoint:
            running = PlainSessions()
            assert not checkpoint.restore(running)
            if "c" in running.states:
                running.close("c")
            for name in ("a", "d"):
                running.put(name, plain_state(2))
            checkpoint.save(running)

    def found() -> str:
        restored = PlainSessions()
        with Checkpoint(folder, MODEL) as checkpoint:
            lost = checkpoint.restore(restored)
        if len(restored.marks) != len(list(folder.glob("*.session"))):
            return "broken: left over"
        marks = "".join(f"{name}{value:.0f}" for name, value in restored.marks.items())
        return {"a1b1c1": "old", "b1a2d2": "new"}.get(marks, f"broken: {marks}, lost {lost}")

    return Scenario(prepare, act, found, {"old", "new"}, act, {folder.name})


# ---- real bundles


def _content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def _changed(made: Path, held: dict[str, bytes]) -> bool:
    return any(held.get(name) != data for name, data in _content(made).items() if name != "manifest.json")


def _opens(target: Path) -> set[str]:
    """Read a bundle as the runtime does, engines included; the files that it lists."""
    from txl_runtime.bundle.encoding import file_sha256
    from txl_runtime.bundle.reading import open_bundle

    bundle = open_bundle(target)
    for name, record in bundle.manifest.files.items():
        path = bundle.file(name)
        if path.stat().st_size != record.size or file_sha256(path) != record.sha256:
            raise ValueError(f"{name} is not what the manifest lists")
    return set(bundle.manifest.files)


def engines(root: Path, made: Path) -> Scenario:
    """`Staging.publish`: one engine replaced, one new, one dropped."""
    import msgspec
    from txl_engines.publishing import staging
    from txl_runtime.bundle.encoding import file_sha256

    target = root / "model.txl"
    first, new, gone = (f"engines/rtx/{name}.engine" for name in ("first", "new", "gone"))

    def prepare() -> None:
        shutil.copytree(made, target)
        document = msgspec.json.decode((target / "manifest.json").read_bytes())
        for name in (first, gone):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(b"old")
            document["files"][name] = {"size": 3, "sha256": file_sha256(target / name)}
        (target / "manifest.json").write_bytes(msgspec.json.encode(document))

    def act() -> None:
        with staging(target) as stage:
            stage.place(first, b"newer")
            stage.place(new, b"newer")
            stage.drop(gone)
            stage.publish()

    def found() -> str:
        listed = _opens(target)  # every engine that is listed is whole
        held = _content(target)
        if _changed(made, held):
            return "broken: the model's files"
        names = {first, new, gone} & listed
        if names == {first, gone} and held[first] == b"old":
            return "old"
        if names == {first, new} and held[first] == b"newer":
            return "new"
        return "fewer" if not names else f"broken: {names}"

    return Scenario(prepare, act, found, {"old", "new", "fewer"}, act, {target.name})


def build(root: Path, made: Path, target_name: str = "cuda") -> Scenario:
    """`build_bundle`, over engines that are there: composed graphs, or TensorRT-RTX in a process of its own."""
    from txl_engines.bundles import build_bundle

    target = root / "model.txl"
    built = root.parent / "built.txl"
    if not built.exists():
        shutil.copytree(made, built)
        build_bundle(built, target_name)
    names = sorted(name for name in _content(built) if name.startswith("engines/"))

    def prepare() -> None:
        shutil.copytree(built, target)

    def found() -> str:
        listed = _opens(target)
        held = _content(target)
        if _changed(made, held):
            return "broken: the model's files"
        return "whole" if listed >= set(names) else "fewer" if not listed & set(names) else "broken: some engines"

    def act() -> None:
        build_bundle(target, target_name, force=True)

    return Scenario(prepare, act, found, {"whole", "fewer"}, lambda: build_bundle(target, target_name), {target.name})


def exported(root: Path, made: Path, force: bool) -> Scenario:
    """A whole export of the smallest model."""
    from txl_export.bundle.placing import publishing
    from txl_export.graphs import tracing

    from stand_ins.smallest import export_smallest

    traced: list[Any] = []
    trace = tracing._trace

    def remember(*arguments: Any) -> Any:
        traced.append(trace(*arguments))
        return trace(*arguments)

    # Tracing writes nothing and takes most of the time: it is done once, and every child has what came of it.
    tracing._trace = remember
    export_smallest(root.parent / "warm.txl", force=True, seed=1)
    models = iter(traced)
    tracing._trace = lambda *_: next(models)

    target = root / "model.txl"
    old = _content(made) if force else {}

    def prepare() -> None:
        if force:
            shutil.copytree(made, target)

    def found() -> str:
        if not os.path.lexists(target):
            return "nothing"
        _opens(target)
        return "old" if _content(target) == old else "new"

    def again() -> None:  # cleaning is the first thing that a run does
        with contextlib.suppress(LookupError), publishing(target, True):
            raise LookupError

    whole = {"old", "new"} if force else {"nothing", "new"}
    return Scenario(prepare, lambda: export_smallest(target, force, seed=1), found, whole, again, {target.name})


SCENARIOS: dict[str, Callable[[Path, Path], Scenario]] = {
    "placing, free name": lambda root, made: toy(root, False),
    "placing, force": lambda root, made: toy(root, True),
    "placing, force, no exchange": lambda root, made: toy(root, True, exchange=False),
    "snapshot, free name": lambda root, made: snapshot(root, False),
    "snapshot, over an old one": lambda root, made: snapshot(root, True),
    "sessions": sessions,
    "kernels": kernels,
    "engines": engines,
    "build": build,
    "build, rtx": lambda root, made: build(root, made, "rtx"),
    "export, free name": lambda root, made: exported(root, made, False),
    "export, force": lambda root, made: exported(root, made, True),
}


# ---- every case


def _child(scenario: Scenario, disk: Disk, number: int, action: tuple[int, int], said: Path, kinds: int) -> int:
    """Write while the disk fails, in a process of its own."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = WRONG
    try:
        from txl_runtime.errors import TxlError

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        disk.arm(number, *action, kinds=kinds)
        disk.plan.pid = os.getpid()  # a signal is for this process, whichever of its children makes the call
        try:
            scenario.act()
            code = FINE
        except TxlError as error:
            code = REFUSED if len(str(error).splitlines()) == 1 and error.exit_code in (1, 2) else WRONG
            told = str(error)
        except (KeyboardInterrupt, SystemExit):
            code, told = STOPPED, ""
        except BaseException:
            told = traceback.format_exc()[-1500:]
        finally:
            disk.rest()
        if code:
            said.write_text(told)
    finally:
        os._exit(code)


def _forked(call: Callable[[], object]) -> str:
    """Call in a process of its own; what went wrong."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            call()
            told = ""
        except BaseException:
            told = traceback.format_exc()[-1500:]
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        told = stream.read()
    os.waitpid(child, 0)
    return told


def cases(scenario: Scenario, disk: Disk, name: str, start: int, step: int, kinds: int) -> Iterator[dict[str, Any]]:
    """One record for each call that could go wrong in this way."""
    root, said = disk.root, disk.folder / "said"
    number = start
    while True:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        said.unlink(missing_ok=True)
        scenario.prepare()
        status = _child(scenario, disk, number, ACTIONS[name], said, kinds)
        hit, told = disk.hit, said.read_text() if said.exists() else ""
        if not hit and status == FINE:
            return
        record: dict[str, Any] = {"number": number, "call": hit, "action": name, "status": status, "said": told}
        record |= {"found": scenario.verdict(), "left": _left(root, scenario.kept)}
        record |= {"again": _forked(scenario.again)}
        yield record | {"then": scenario.verdict(), "left then": _left(root, scenario.kept)}
        number += step


def _left(root: Path, kept: set[str]) -> list[str]:
    hidden = [path for path in root.rglob("*") if path.name.startswith(".") or path.parent == root]
    return sorted(path.relative_to(root).as_posix() for path in hidden if path.name not in kept)


def wrong(record: dict[str, Any], scenario: Scenario) -> list[str]:
    """Return the problems of a case's record."""
    found, status, action = record["found"], record["status"], record["action"]
    killed = action.startswith("kill")
    problems = []
    stepped_aside = killed and found == "nothing" and any(".replaced-" in name for name in record["left"])
    if found not in scenario.whole and not stepped_aside:
        problems.append(f"found {found}")
    expected = {-signal.SIGKILL} if killed else {FINE, REFUSED} if action in ERRORS else {FINE, REFUSED, STOPPED}
    if status not in expected or (scenario.quiet and status == REFUSED):
        problems.append(f"ended with {status}")
    if status == FINE and found in ("nothing", "old") and not scenario.quiet:
        problems.append("all is well, it said")
    if record["again"] or record["left then"] or record["then"].startswith("broken"):
        problems.append("the next run")
    if action in ("interrupt", "terminate") and record["left"]:
        problems.append("left over")
    return problems


def powerless(scenario: Scenario, disk: Disk, subsets: int, step: int) -> tuple[int, int, list[str]]:
    """Lose power after every call of one undisturbed run, with all, nothing and random parts of the rest kept.

    Returns:
        How many records there were, how many cases were looked at, and what went wrong.
    """
    root = disk.root
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    scenario.prepare()
    os.truncate(disk.diary, 0)  # it is open
    model = Model(root)
    assert _forked(lambda: (disk.arm(log=True), scenario.act())) == ""
    disk.rest()
    written, draws, problems, count = scenario.found(), random.Random(1), [], 0
    names = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    records, verdicts = [*read_diary(disk.diary)], dict[str, str]()
    for index, record in enumerate([*records, None]):
        if record is not None:
            model.happen(record)
            if index % step and record["what"] not in ("rename", "exchange", "sync"):
                continue
        choices: list[Callable[[], bool]] = [lambda: False, lambda: True]
        choices += [lambda share=share: draws.random() < share for share in (0.5, 0.1, 0.9) * (subsets // 3 + 1)]
        for number, keep in enumerate(choices[: subsets + 2]):
            left = model.left(keep)
            if record is None and number == 1:
                assert {name: data for name, data in left.items() if data is not None} == names, "the model is wrong"
            visible = repr(sorted((name, data) for name, data in left.items() if not name.startswith(".")))
            if visible not in verdicts:
                shutil.rmtree(root, ignore_errors=True)
                root.mkdir()
                put(left, root)
                verdicts[visible] = scenario.verdict()
            verdict = verdicts[visible]
            count += 1
            aside = verdict == "nothing" and any(".replaced-" in name for name in left)
            if (verdict not in scenario.whole and not aside) or (record is None and verdict != written):
                problems.append(f"after {index} of {len(records)} records, choice {number}: {verdict}")
    return len(records), count, problems


def main() -> None:
    """Run the cases of one scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("actions", nargs="+", choices=[*ACTIONS, "power"])
    parser.add_argument("--made", type=Path, default=Path())
    parser.add_argument("--from", type=int, default=1, dest="start")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--subsets", type=int, default=20, help="random ones, after each record, of a loss of power")
    given = parser.parse_args()
    disk = Disk(given.folder)
    disk.rest()
    scenario = SCENARIOS[given.scenario](disk.root, given.made)
    if given.actions == ["power"]:
        records, count, problems = powerless(scenario, disk, given.subsets, given.step)
        print(json.dumps({"cases": count, "records": records, "failures": problems}))
        sys.stdout.flush()
        os._exit(0)
    kinds = sum(1 << KINDS.index(kind) for kind in set(given.kinds))
    count, failures, left, calls = 0, [], 0, set()
    for name in given.actions:
        for record in cases(scenario, disk, name, given.start, given.step, kinds):
            count += 1
            calls.add(record["call"].split(" ")[0])
            left += bool(record["left"])
            if problems := wrong(record, scenario):
                failures.append({"problems": problems, **record})
    print(json.dumps({"cases": count, "calls": sorted(calls), "left over": left, "failures": failures}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
