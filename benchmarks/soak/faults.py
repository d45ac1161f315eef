"""Let everything that writes files fail, be killed or lose power at each system call, and print a table of all cases.

    python benchmarks/soak/faults.py                        # all cases, half an hour
    python benchmarks/soak/faults.py --only snapshot,engines
    python benchmarks/soak/faults.py --out docs/measurements

The script needs Linux and a C compiler. `tests/stand_ins/faulty_writing.py` defines the cases, and
`tests/stand_ins/power_loss.py` the model of a disk that loses power. The tests run some of these cases, this script
runs all. Cases that went wrong are printed, and then the exit code is 1.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "helpers"))

from stand_ins.disk import compiler, run_cases
from stand_ins.smallest import export_smallest

from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

WRITES = ("--kinds", *"open write sync rename mkdir unlink rmdir mmap truncate chmod link".split())  # noqa: SIM905
"""Options that choose the calls that change files. For exports, a run without these options tries every third call."""
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EDQUOT")
SIGNALS = ("kill", "kill after", "interrupt", "terminate")

RUNS: list[tuple[str, tuple[object, ...]]] = [
    *((name, (*ERRORS, "short", *SIGNALS)) for name in ("snapshot, free name", "snapshot, over an old one")),
    ("sessions", (*ERRORS, "short", *SIGNALS)),
    ("kernels", ("ENOSPC", "EIO", "EACCES", "short", "kill", "kill after", "interrupt")),
    *(
        (name, (*ERRORS, "short", *SIGNALS))
        for name in ("placing, free name", "placing, force", "placing, force, no exchange")
    ),
    ("engines", ("ENOSPC", "EIO", "kill", "kill after", "interrupt")),
    ("build", ("EIO", "kill")),
    ("build, rtx", ("kill", "--step", 12)),
    *((name, ("ENOSPC", "EIO", "EACCES", *SIGNALS, *WRITES)) for name in ("export, free name", "export, force")),
    ("export, free name", ("EIO", "--step", 3)),
    *(
        (name, ("power",))
        for name in (
            "snapshot, free name",
            "snapshot, over an old one",
            "sessions",
            "placing, free name",
            "placing, force",
            "placing, force, no exchange",
            "engines",
            "build",
            "export, free name",
            "export, force",
        )
    ),
]


def main() -> None:
    """Read the command line, run the chosen cases of `RUNS`, and print the table; exit with 1 after failures."""
    names = dict.fromkeys(name for name, _ in RUNS)
    options = parser(
        __doc__,
        seconds=None,
        quick="snapshots over an old one alone: proves that it runs",
        threads="changes nothing here",
    )
    options.add_argument("--only", default="", help=f"beginnings of names, separated by commas; of: {'; '.join(names)}")
    given = options.parse_args()
    if compiler() is None:
        sys.exit("the failing disk is C for Linux, expected gcc; install it")
    chosen = ("snapshot, over",) if given.quick else tuple(given.only.split(","))
    table = Table(("what writes", "what happens", "cases", "failures", "seconds"))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "made.txl"
        export_smallest(result)
        for number, (name, how) in enumerate(RUNS):
            if not name.startswith(chosen):
                continue
            folder = Path(place) / f"run{number}"
            folder.mkdir()
            started = time.monotonic()
            found = run_cases(folder, name, *how, "--made", result, timeout=7200)
            shutil.rmtree(folder)
            told = ", ".join(str(word) for word in how if word not in WRITES)
            table.add(name, told, found["cases"], len(found["failures"]), time.monotonic() - started)
            rows.append({"what writes": name, "what happens": told, **found})
            log(f"{name}, {told}: {found['cases']} cases, {len(found['failures'])} failures")
            for failure in found["failures"][:3]:
                log(f"    {json.dumps(failure)[:1000]}")
    finish("faults", given, [table], rows)
    sys.exit(any(row["failures"] for row in rows))


if __name__ == "__main__":
    main()
