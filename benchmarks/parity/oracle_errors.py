"""Print each code base's largest errors against its original implementation, as docs/measurements/parity.md has them.

python benchmarks/parity/oracle_errors.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "helpers"))

from oracle import LANGUAGE_MODELS, oracle_errors, refuses_kv

NAMES = {"extra/x01": "cntxl", "extra/x10": "remixl", "extra/x20": "fastai"}


def main() -> None:
    """Export and run every case with K/V and with hidden memory; print the largest errors of each code base."""
    worst: dict[tuple[str, str], list[float]] = {}
    for case in LANGUAGE_MODELS:
        code_base = NAMES.get(case[:9], case.split("/")[0])
        for memory in ("kv", "hidden"):
            if memory == "kv" and refuses_kv(case):
                continue
            with tempfile.TemporaryDirectory() as folder:
                errors = oracle_errors(case, memory, Path(folder))
            known = worst.setdefault((code_base, memory), [0.0, 0.0, 0.0])
            worst[code_base, memory] = [known[0] + 1, max(known[1], errors[0]), max(known[2], errors[1])]
    print("| code base | memory | cases | log-probs max abs | memory max abs |")
    print("|---|---|---|---|---|")
    for (code_base, memory), (cases, logprobs, remembered) in sorted(worst.items()):
        print(f"| {code_base} | {memory} | {cases:.0f} | {logprobs:.1e} | {remembered:.1e} |")


if __name__ == "__main__":
    main()
