"""Print the table of systems in docs/models.md: errors of a small bundle of each system over 300 steps with resets.

python benchmarks/parity/systems_table.py [SYSTEM…]

The errors are the differences between a bundle and its module. A system whose package is missing (`make packages`
installs them) is exported from a minimal module with the same tensors.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "helpers"))

from systems import SYSTEMS, errors

HEADER = ("system", "carried from step to step", "how", "outputs", "states")


def main(names: list[str]) -> None:
    """Print the table's head, and a row for each named system, or for all systems."""
    if unknown := [name for name in names if name not in SYSTEMS]:
        sys.exit(f"there is no system {', '.join(unknown)}, expected {', '.join(SYSTEMS)}")
    print(f"| {' | '.join(HEADER)} |")
    print("|" + "---|" * len(HEADER))
    for name in names or SYSTEMS:
        print(f"| {' | '.join(line(name))} |", flush=True)


def line(name: str) -> tuple[str, ...]:
    """Return the cells of a system's row, in the order of `HEADER`."""
    system, result = SYSTEMS[name], ("–", "–")
    if system.source:
        with tempfile.TemporaryDirectory() as folder:
            outputs, states = errors(system, Path(folder))
        result = f"{outputs:.0e}", f"{states:.0e}" if states else "0"
    return name, system.carried, system.said, *result


if __name__ == "__main__":
    main(sys.argv[1:])
