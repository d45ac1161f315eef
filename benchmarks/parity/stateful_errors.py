"""Print the errors of bundles of other packages' models with state, as docs/measurements/own_models.md has them.

python benchmarks/parity/stateful_errors.py [CASE…]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "helpers"))

from models_table import engines_of
from oracle_stateful import BUILDS, GROWTH, Case, errors, export_case, run_bundle


def main(names: list[str]) -> None:
    """Export and run each named case, or all cases, build their engines, and print a row of the table for each."""
    print("| case | the package's model | sequences | programs | outputs | states | TensorRT-RTX |")
    print("|---|---|---|---|---|---|---|")
    for name in names or sorted(BUILDS):
        with tempfile.TemporaryDirectory() as folder:
            print(_line(Case(name), Path(folder)), flush=True)


def _line(case: Case, folder: Path) -> str:
    result = export_case(case, folder / "bundle.txl", growth=GROWTH.get(case.name, "auto"))
    manifest = result.manifest
    outputs, states = errors(run_bundle(case, result.path), case)
    carried = f"{states:.1e}" if manifest.states else "none"
    package = f"{case.facts['implementation']['package'].split('@')[0]}, {case.facts['family']}"
    open_rows = any("rows" in spec.shape for program in manifest.programs for spec in program.inputs)
    programs = f"{len(manifest.programs)}{', rows open' if open_rows else ''}"
    engines = engines_of(export_case(case, folder / "stages.txl", growth="stages") if open_rows else result)
    row = (case.name, package, manifest.streams, programs, f"{outputs:.1e}", carried, engines)
    return f"| {' | '.join(row)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
