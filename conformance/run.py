"""The conformance list, run through a driver: every vector of every bundle, then the bad bundles.

    python conformance/run.py [--driver COMMAND] [--only NAME] [--silence SECONDS] [--json]

Exit code 0 where all was as expected, 1 where anything was not, 2 where the list or the driver cannot be used.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from rich.text import Text
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import TxlError, UsageError, todo_about
from txl_runtime.listener import Listener

from conformance import spoiling
from conformance.driver import PROMISES, engine
from conformance.judging import Judge, Wrong, same_bits
from conformance.talking import DriverFailed, Talk
from txl_deploy.console import Display, facts_table, number, plain, print_json, rows_table, stdout

FOLDER = Path(__file__).parent
OWN = (sys.executable, str(FOLDER / "driver.py"))
"""Python's own driver."""
BAD = "bad_bundles"
FORMAT = "txl-deploy.conformance"
MOST = 12
"""Failures that are shown; --json has all."""
T = TypeVar("T")


class Step(Struct, forbid_unknown_fields=True):
    """A request, and the reply expected."""

    request: dict[str, Any]
    reply: dict[str, Any]


class Vector(Struct, forbid_unknown_fields=True):
    """The requests for one fresh stream.

    Attributes:
        shows: the promises that it is for.
        update: the update rule that the bundle is loaded with; None for the driver's choice.
        b, memory_length: of the stream.
    """

    shows: list[str]
    update: str | None
    b: int
    memory_length: int | None
    steps: list[Step]


class Index(Struct):
    """`index.json` of the folder."""

    format: str
    version: int
    bundles: list[str]


class Hello(Struct):
    """A driver's description of itself; `supports` are the promises that it keeps."""

    name: str
    version: str
    engine: str
    supports: list[str]


@dataclass
class Failure:
    """One vector or bad bundle that was not as expected; `vector` is its line, or the name of the bad bundle."""

    bundle: str
    vector: int | str
    shows: list[str]
    found: str


@dataclass
class Tally:
    """The results of the vectors of one bundle, or of the bad bundles.

    Attributes:
        largest, limit: differences of numbers; None where there are none.
        same_bits: whether all numbers were those of Python's own driver; None where that was not asked.
        refused, opened, died: what bad bundles led to.
        kept: the promises that vectors showed which passed.
        declined: those that vectors showed which the driver did not run, though it says that it keeps them.
    """

    name: str
    vectors: int = 0
    passed: int = 0
    failed: int = 0
    unsupported: int = 0
    largest: float | None = None
    limit: float | None = None
    same_bits: bool | None = None
    refused: int = 0
    opened: int = 0
    died: int = 0
    kept: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def fail(self, vector: int | str, shows: list[str], found: str) -> None:
        """Count a failure."""
        self.failed += 1
        self.failures.append(Failure(self.name, vector, shows, found))


@dataclass
class Conformance:
    """The list: its folder, its bundles, and the command that answers.

    Args:
        folder: of the list.
        driver: words of a command; None for Python's own.
        silence: seconds that a reply may take.
        only: names of bundles, or `bad_bundles`; all without any.

    Attributes:
        hello: what the driver says of itself, once it has run.

    Raises:
        UsageError: the folder has no list, or it has no such names.
    """

    folder: Path
    driver: tuple[str, ...] | None = None
    silence: float = 60.0
    only: Sequence[str] = ()
    hello: Hello = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        index = _read(self.folder / "index.json", Index)[0]
        if index.format != FORMAT or index.version != 1:
            raise UsageError(
                f"{self.folder}: a list of {index.format} {index.version}, expected {FORMAT} 1; use its own release"
            )
        known = [*index.bundles, BAD]
        for name in self.only:
            if name not in known:
                raise UsageError(f"--only is {name!r}, expected one of {', '.join(known)}; {todo_about(name, known)}")
        self._names = [name for name in known if not self.only or name in self.only]

    def run(self, listener: Listener) -> Iterator[Tally]:
        """Run the vectors of each bundle in turn, then open the bad bundles; yields the results of each.

        Raises:
            UsageError: the driver cannot be started, or does not say who it is.
        """
        vectors = {
            name: _read(self.folder / "vectors" / f"{name}.jsonl", Vector) for name in self._names if name != BAD
        }
        with self._talk() as talk:
            self.hello = _hello(talk)
        compared = self.driver is not None and engine() == self.hello.engine
        listener.stage("vectors", sum(map(len, vectors.values())))
        for name, some in vectors.items():
            yield self._bundle(name, some, compared, listener)
        if BAD in self._names:
            yield self._bad_bundles(listener)

    def _talk(self, own: bool = False) -> Talk:
        return Talk(OWN if own or self.driver is None else self.driver, self.silence)

    def _bundle(self, name: str, vectors: list[Vector], compared: bool, listener: Listener) -> Tally:
        path, supported = self.folder / "bundles" / name, set(self.hello.supports)
        judge, tally = Judge(open_bundle(path).manifest), Tally(name, len(vectors))
        same, broken = compared, ""
        with ExitStack() as stack:
            players = [_Player(stack.enter_context(self._talk(own)), path) for own in (False, True)[: 1 + compared]]
            for number, vector in enumerate(vectors, 1):
                listener.advance()
                if not supported.issuperset(vector.shows):
                    tally.unsupported += 1
                elif broken:
                    tally.fail(number, vector.shows, f"was not run: the driver {broken}")
                else:
                    try:
                        same = _play(vector, players, judge) and same
                        tally.passed += 1
                        tally.kept = sorted({*tally.kept, *vector.shows})
                    except _NotSupported:
                        tally.unsupported += 1
                        tally.declined = sorted({*tally.declined, *vector.shows})
                    except Wrong as wrong:
                        tally.fail(number, vector.shows, str(wrong))
                    except DriverFailed as failed:
                        broken = str(failed)
                        tally.fail(number, vector.shows, f"the driver {broken}")
        tally.largest, tally.limit = (judge.largest, judge.limit) if tally.passed + tally.failed else (None, None)
        tally.same_bits = same and not tally.failed if compared and tally.passed else None
        return tally

    def _bad_bundles(self, listener: Listener) -> Tally:
        corpus, supported = self.folder / BAD, set(self.hello.supports)
        document = spoiling.index(corpus)
        cases = document["cases"]
        left_out = {name for promise, names in document["needs"].items() if promise not in supported for name in names}
        tally, left = Tally(BAD, len(cases)), iter(enumerate(cases))
        listener.stage("bad bundles", len(cases))
        with tempfile.TemporaryDirectory(prefix="txl-conformance-") as folder:
            died = True
            while died:  # anew after a case that ended the process
                died = False
                with self._talk() as talk:
                    for number, case in left:
                        listener.advance()
                        if left_out & {case["promise"], case["base"]}:
                            tally.unsupported += 1
                            continue
                        (Path(folder) / str(number)).mkdir()
                        path = spoiling.build(case, Path(folder) / str(number) / "bundle.txl", corpus)
                        try:
                            found, said = spoiling.outcome(talk, path, supported, case["expected"] == spoiling.TRIED)
                        except DriverFailed as failed:
                            found, said, died = "died", str(failed), True
                        _count(tally, case, found, said)
                        shutil.rmtree(path.parent)
                        if died:
                            break
        return tally


class _NotSupported(Exception):  # noqa: N818
    """The driver says that it cannot do this."""


class _Player:
    """A driver at one bundle: what it has loaded, and what it saved last."""

    def __init__(self, talk: Talk, path: Path) -> None:
        self._talk, self._path, self._saved = talk, path, ""
        self._loaded: tuple[str | None, ...] = ()

    def begin(self, vector: Vector) -> None:
        """Give the vector a fresh stream."""
        if self._loaded != (vector.update,):
            self._loaded = ()
            loaded = self._good({"do": "load", "path": str(self._path), "update": vector.update})
            if vector.update not in (None, loaded["ok"].get("update")):
                raise Wrong(f"load took update {loaded['ok'].get('update')!r}, expected {vector.update!r}")
            self._loaded = (vector.update,)
        self._good({"do": "open", "b": vector.b, "memory_length": vector.memory_length})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; bytes that are null are those that this driver saved last."""
        if "bytes" in request and request["bytes"] is None:
            request = request | {"bytes": self._saved}
        reply = self._talk.ask(request)
        if reply.get("kind") == "unsupported" and "ok" not in reply:
            raise _NotSupported
        if request["do"] in ("save", "take") and isinstance(reply.get("ok"), dict):
            self._saved = str(reply["ok"].get("bytes"))
        return reply

    def _good(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self.ask(request)
        if not isinstance(reply.get("ok"), dict):
            raise Wrong(f"{request['do']} was refused: {str(reply.get('refused'))[:160]}")
        return reply


def _play(vector: Vector, players: list[_Player], judge: Judge) -> bool:
    """Run a vector; whether the players, if there are two, said the same to the bit.

    Raises:
        Wrong: the first player was wrong; the message names the step.
        DriverFailed, _NotSupported: likewise.
    """
    same = True
    for player in players:
        player.begin(vector)
    for place, step in enumerate(vector.steps, 1):
        found, *others = [player.ask(step.request) for player in players]
        try:
            judge.check(step.reply, found)
        except Wrong as wrong:
            raise Wrong(f"step {place}, {step.request.get('do')}: {wrong}") from None
        same = same and all(same_bits(other, found) for other in others)
    return same


def _count(tally: Tally, case: dict[str, Any], found: str, said: str) -> None:
    """Enter what became of a bad bundle."""
    tally.refused += found.startswith("refused")
    tally.died += found == "died"
    allowed = spoiling.allowed(case["expected"])
    if found in allowed:
        tally.passed += 1
        tally.kept = sorted({*tally.kept, case["promise"]})
    elif found == "unsupported":
        tally.unsupported += 1
    else:
        tally.opened += found not in ("died", "refused")
        told = f"{found}, expected {' or '.join(allowed)}" if found != "died" else f"the driver {said}"
        tally.fail(case["name"], [case["promise"]], f"{told}{f': {said}' if said and found != 'died' else ''}")


def _hello(talk: Talk) -> Hello:
    """Ask a driver to describe itself.

    Raises:
        UsageError: it does not, or says something else.
    """
    try:
        found = talk.ask({"do": "hello"}).get("ok")
    except DriverFailed as failed:
        raise UsageError(f"the driver {failed}; conformance/README.md says what it is asked") from None
    try:
        return msgspec.convert(found, Hello)
    except msgspec.ValidationError as error:
        raise UsageError(f"the driver's hello: {error}; conformance/README.md says what it has to hold") from None


def _read(path: Path, kind: type[T]) -> list[T]:
    """Read the objects of one kind from a file of JSON lines.

    Raises:
        UsageError: the file holds something else.
    """
    found: list[T] = []
    try:
        for line in path.read_bytes().splitlines() or [b""]:
            found.append(msgspec.json.decode(line, type=kind))
        return found
    except OSError as error:
        why = f"{error.strerror}, expected a file of the conformance list; give its --folder"
    except msgspec.DecodeError as error:
        why = f"line {len(found) + 1}: {error}, expected a conformance list; take a whole copy of it"
    raise UsageError(f"{path}: {why}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the list, and show what became of it."""
    parser = argparse.ArgumentParser(description="Run the conformance list through a runtime's driver.")
    parser.add_argument("--driver", metavar="COMMAND", help="what answers requests (default Python's own)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the conformance list")
    parser.add_argument("--only", metavar="NAME", action="append", help=f"a bundle of the list, or {BAD}; repeatable")
    parser.add_argument("--silence", metavar="SECONDS", type=float, default=60.0, help="that a reply may take")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    try:
        if not 0 < given.silence < float("inf"):
            raise UsageError(f"--silence is {given.silence:g}, expected seconds, more than 0")
        driver = None if given.driver is None else _words(given.driver)
        asked = Conformance(given.folder, driver, given.silence, given.only or ())
        with Display() as display:
            found = list(asked.run(display))
    except TxlError as error:
        sys.stderr.write(f"error: {plain(str(error))}\n")
        return error.exit_code
    claimed = {name for tally in found for name in tally.declined} - {name for tally in found for name in tally.kept}
    right = not claimed and not any(tally.failed for tally in found) and any(tally.passed for tally in found)
    if given.json:
        driver_facts = msgspec.to_builtins(asked.hello)
        print_json({"driver": driver_facts, "passed": right, "bundles": [asdict(tally) for tally in found]})
    else:
        _show(asked, found, claimed, right)
    return 0 if right else 1


def _words(driver: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(driver))
    except ValueError as error:
        raise UsageError(f"--driver is {driver!r}: {error}; expected a command as a shell takes it") from None
    if not words:
        raise UsageError("--driver is empty, expected a command; leave it out for Python's own")
    return words


def _show(asked: Conformance, found: list[Tally], claimed: set[str], right: bool) -> None:
    """Print tables, then failures, then the verdict."""
    said = {None: "–", True: "yes", False: "no"}
    shared = ["vectors", "passed", "failed", "unsupported"]
    rows = {tally.name: [getattr(tally, name) for name in shared] for tally in found}
    names = ["vectors", "passed", "failed", "not supported"]
    good = [
        [t.name, *rows[t.name], number(t.largest), number(t.limit), said[t.same_bits]] for t in found if t.name != BAD
    ]
    if good:
        stdout.print(rows_table(["bundle", *names, "largest", "limit", "same bits"], good))
    for t in found[-1:]:
        if t.name == BAD:
            counts = [*rows[BAD], t.refused, t.opened, t.died]
            stdout.print(rows_table(["\nbad bundles", *names[1:], "refused", "wrongly opened", "died"], [counts]))
    failures = [failure for tally in found for failure in tally.failures]
    for failure in failures[:MOST]:
        place = f"{failure.bundle}, {failure.vector} ({', '.join(failure.shows)})"
        stdout.print(Text(f"{place}: ", "bold") + Text(plain(" ".join(failure.found.split())[:300])))
    if len(failures) > MOST:
        stdout.print(f"and {len(failures) - MOST} more; --json has all")
    facts: dict[str, object] = {
        "driver": f"{asked.hello.name} {asked.hello.version}, {asked.hello.engine}",
        "not supported": sum(tally.unsupported for tally in found),
    }
    kept = {promise for tally in found for promise in tally.kept}
    if broken := sorted({promise for failure in failures for promise in failure.shows} - kept):
        facts["kept by no vector"] = ", ".join(broken)
    if unknown := sorted(set(asked.hello.supports) - set(PROMISES)):
        facts["unknown promises"] = ", ".join(unknown)
    if claimed:
        facts["claimed, but never done"] = ", ".join(sorted(claimed))
    failing = Text("FAILED" if failures or claimed else "nothing was run", "bold red")
    stdout.print(facts_table(facts | {"verdict": Text("passed", "green") if right else failing}))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
