"""Record the errors and warnings that each test receives, and compare two records, to show that a change loses none.

    python benchmarks/compare/messages.py record OLD.json --source ../old TESTS [pytest's arguments]
    python benchmarks/compare/messages.py record NEW.json TESTS [pytest's arguments]
    python benchmarks/compare/messages.py compare OLD.json NEW.json

A record has, in order, each error of this project that `pytest.raises` caught, each error line of a command, and each
warning that a listener received. Names of folders and addresses of memory, which differ from run to run, are replaced
by fixed words. `compare` prints every test whose messages differ, and ends with exit code 1 if there is such a test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLACE = "TXL_MESSAGES"
"""The environment variable that names the file to write."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_TEMPORARY = re.compile(r"(?:/tmp|/var/tmp)/[^\s:;,'\"()]*/")
_OURS = ("txl_runtime", "txl_export", "txl_engines", "txl_report", "txl_deploy")

_ROOT = Path.cwd()
_told: list[str] = []
_record: dict[str, list[str]] = {}


def plain(text: str, root: Path) -> str:
    """Return a message with fixed words for paths and addresses, which differ between runs and between checkouts."""
    return _TEMPORARY.sub("TMP/", _ADDRESS.sub("0x", text.replace(str(root), "ROOT")))


def _tell(kind: str, text: str) -> None:
    _told.append(f"{kind}: {plain(text, _ROOT)}")


def pytest_configure() -> None:
    """Wrap the functions by which a test gets messages: `pytest.raises`, listeners, commands here and in processes."""
    from _pytest.raises import RaisesExc
    from txl_runtime.listener import Listener

    leave = RaisesExc.__exit__

    def left(self: Any, kind: Any, value: Any, trace: Any) -> bool:
        if kind is not None and kind.__module__.partition(".")[0] in _OURS:
            _tell(kind.__name__, str(value))
        return leave(self, kind, value, trace)

    setattr(RaisesExc, "__exit__", left)  # noqa: B010 - mypy knows it for a method

    def init_subclass(cls: Any) -> None:
        super(Listener, cls).__init_subclass__()
        if "warn" in vars(cls):
            cls.warn = _heard(vars(cls)["warn"])

    setattr(Listener, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - mypy knows another type of it
    run = subprocess.run

    def ran(*arguments: Any, **options: Any) -> Any:
        done = run(*arguments, **options)
        shown = done.stderr.decode(errors="replace") if isinstance(done.stderr, bytes) else done.stderr or ""
        for line in shown.splitlines():
            if line.startswith("error: "):
                _tell("command", line)
        return done

    subprocess.run = ran
    try:
        from txl_deploy import main
    except ImportError:
        return
    fail = main._fail

    def failed(message: str, code: int, details: Any = None) -> int:
        _tell("command", message)
        return fail(message, code, details)

    main._fail = failed


def _heard(warn: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    def warned(self: Any, message: str) -> None:
        _tell("warning", message)
        warn(self, message)

    return warned


def pytest_runtest_setup() -> None:
    """Begin a test with an empty list of messages."""
    _told.clear()


def pytest_runtest_teardown(item: Any) -> None:
    """Attach the messages to the test's report, which also reaches the process that writes the record."""
    item.user_properties.append(("messages", list(_told)))


def pytest_runtest_logreport(report: Any) -> None:
    """Store the messages of a test, from the report of its last phase."""
    if report.when == "teardown":
        names = [text for name, texts in report.user_properties if name == "messages" for text in texts]
        if names:
            _record[report.nodeid] = names


def pytest_sessionfinish(session: Any) -> None:
    """Write the record, but not in the worker processes that pytest-xdist starts."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[PLACE]).write_text(json.dumps(_record, indent=1, sort_keys=True) + "\n")


def record(out: Path, source: Path, arguments: list[str]) -> int:
    """Run pytest in a checkout with the checkout's packages, write the record to `out`, and return pytest's status."""
    environment = os.environ | {PLACE: str(out.resolve()), "PYTHONPATH": str(Path(__file__).resolve().parent)}
    python = source / ".venv/bin/python"
    command = [str(python if python.is_file() else sys.executable), "-m", "pytest", "-p", "messages", *arguments]
    return subprocess.run(command, cwd=source, env=environment).returncode


def compare(old: Path, new: Path) -> int:
    """Print each test whose messages differ, and the tests that only one record has; return 1 if any was lost."""
    one, two = (json.loads(path.read_text()) for path in (old, new))
    differ = [test for test in one if test in two and one[test] != two[test]]
    for test in differ:
        sys.stdout.write(f"{test}\n")
        sys.stdout.writelines(f"  - {text}\n" for text in one[test] if text not in two[test])
        sys.stdout.writelines(f"  + {text}\n" for text in two[test] if text not in one[test])
    for names, tests in (("only in the old", one.keys() - two.keys()), ("only in the new", two.keys() - one.keys())):
        sys.stdout.writelines(f"{names}: {test}\n" for test in sorted(tests))
    same = sum(len(one[test]) for test in one if test in two and one[test] == two[test])
    sys.stdout.write(f"{same} messages are the same word for word, {len(differ)} tests were told something else\n")
    return 1 if differ or one.keys() - two.keys() else 0


def main() -> int:
    """Read the command line; record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recorded = verbs.add_parser("record")
    recorded.add_argument("out", type=Path)
    recorded.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[2])
    compared = verbs.add_parser("compare")
    compared.add_argument("old", type=Path)
    compared.add_argument("new", type=Path)
    options, rest = parser.parse_known_args()
    if options.verb == "record":
        return record(options.out, options.source, rest)
    return compare(options.old, options.new)


if __name__ == "__main__":
    raise SystemExit(main())
