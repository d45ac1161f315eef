"""The table of systems in docs/models.md: each one's small bundle beside its module over 300 steps with resets.

python benchmarks/parity/systems_table.py [SYSTEM…]

A system whose package `make packages` has not installed is exported from a minimal module of the same tensors.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "helpers"))

from systems import SYSTEMS, errors

HEADER = ("system", "carried from step to step", "how", "outputs", "states")


def main(names: list[str]) -> None:
    """Print a line for each system."""
    if unknown := [name for name in names if name not in SYSTEMS]:
        sys.exit(f"there is no system {', '.join(unknown)}, expected {', '.join(SYSTEMS)}")
    print(f"| {' | '.join(HEADER)} |")
    print("|" + "---|" * len(HEADER))
    for name in names or SYSTEMS:
        print(f"| {' | '.join(line(name))} |", flush=True)


def line(name: str) -> tuple[str, ...]:
    """Return the page's line for a system, in the order of `HEADER`."""
    system, result = SYSTEMS[name], ("–", "–")
    if system.source:
        with tempfile.TemporaryDirectory() as folder:
            outputs, states = errors(system, Path(folder))
        result = f"{outputs:.0e}", f"{states:.0e}" if states else "0"
    return name, system.carried, system.said, *result


if __name__ == "__main__":
    main(sys.argv[1:])
