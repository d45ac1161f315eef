"""Export the models with steps of their own that `bit_equality.py` compares, at least one for each way to keep state.

    python benchmarks/compare/own_cases.py FOLDER --source ../checkout [--only NAME ...]

The script exports the models into FOLDER, in one process, with the packages of the checkout. The models come from the
checkout's samples and tests. Each model's random weights have the same seed. The names of the exported models are
printed as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class OwnCase:
    """One export.

    Attributes:
        source: FILE.py:FUNCTION below the checkout, or a name of `tests/helpers/step_models.py` (graphs written by
            hand) or of `tests/stand_ins/small_steps.py`, or a case of `tests/helpers/oracle_stateful.py`.
        shows: the kind of state and other properties of the model, printed when the case begins.
        lengths: segment lengths; () if the inputs have no positions.
        more: further arguments of `txl_export.export`.
        targets: the engines to build: for each, the argument of `build --target`, and options.
    """

    name: str
    source: str
    shows: str
    lengths: tuple[int, ...] = ()
    batch_size: int = 4
    more: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()


ENGINES = ("rtx --sm 86", "cuda")
LSTM, GTRXL, GATED = "samples/policy/lstm.py:build", "samples/policy/gtrxl.py:build", "changed_transformer_xl.py:build"
OWN_CASES = (
    OwnCase("own-lstm", LSTM, "an LSTM, the batch second", (4, 1), targets=ENGINES),
    OwnCase("own-lstm-1", LSTM, "an LSTM of one sequence, verified", (1,), 1, {"verify": True}),
    OwnCase("own-lstm-fp16", LSTM, "half precision", (4, 1), 4, {"precision": "fp16"}),
    OwnCase("own-gtrxl", GTRXL, "rows and an int32 counter for each sequence", (4, 1), targets=ENGINES),
    OwnCase("own-gated-xl", f"samples/own/{GATED}", "tokens of any length (`lengths=True`)", (8, 1)),
    OwnCase("own-gated-xl-fp16", f"samples/own/{GATED}", "tokens in half precision", (8, 1), 2, {"precision": "fp16"}),
    OwnCase("own-selective", "samples/own/selective_state.py:build", "tokens of exact lengths", (8, 1)),
    OwnCase("own-frames", "samples/own/streaming_frames.py:build", "frames that lie ahead, a bank of rows", (8,)),
    OwnCase(
        "own-policy",
        "samples/own/recurrent_policy.py:build",
        "a step without positions, verified",
        (),
        4,
        {"verify": True},
    ),
    OwnCase("own-cell", "cell", "a state that the module keeps itself, log-probabilities without positions"),
    OwnCase("own-window", "window", "rows that become more, in one graph, in lockstep", (3, 1), 3),
    OwnCase("own-window-stages", "window", "the same, a graph per stage", (2,), 3, {"growth": "stages"}, ("cuda",)),
    OwnCase("own-absent", "absent", "a state that is absent at first", (), 3),
    OwnCase("own-ahead", "ahead", "a learned start, an int64 counter, positions ahead", (5, 2)),
    OwnCase("own-counted", "counted", "features of any length", (6, 1)),
    OwnCase("own-labml", "lc01_labml", "two memories that grow at different times", (4,), 2, {"growth": "stages"}),
    OwnCase("own-rwkv", "rw01_rwkv", "lockstep, the batch first, three lengths", (4, 3, 1), 2),
    OwnCase("own-emformer", "em01_emformer", "three states a layer, positions ahead", (4,)),
    OwnCase("own-di-engine", "gd01_policy_step", "the batch at the third axis, outputs with time first", (1,)),
    OwnCase("own-knnlm", "kn01_knnlm", "no state and no batch", (5,), 1),
    OwnCase("own-types", "recurrent", "float32, int32 and bool, a start from a tensor", batch_size=3),
    OwnCase("own-shared", "growing", "a clock that all sequences share, rows that grow, one absent", batch_size=3),
    OwnCase("own-counting", "counting", "tokens of any length, a start from a tensor", batch_size=3),
)


def source_of(case: OwnCase, checkout: Path) -> Any:
    """Return the source of a case, in a form that `txl_export.export` accepts."""
    if ":" in case.source:
        return f"{checkout / case.source}"
    small: Any = importlib.import_module("stand_ins.small_steps")
    if case.source in small.EVERY:
        return small.EVERY[case.source]()
    oracle: Any = importlib.import_module("oracle_stateful")
    return oracle.Case(case.source).build()


def export_own(case: OwnCase, path: Path, checkout: Path) -> None:
    """Export a case to a path with the packages that this process imports."""
    import torch
    from txl_export import export

    hand_made: Any = importlib.import_module("step_models")
    if case.source in hand_made.MODELS:
        shutil.rmtree(path, ignore_errors=True)
        hand_made.MODELS[case.source]().write(path)
        return
    torch.manual_seed(0)
    options = {"batch_size": case.batch_size, "verify": False, "force": True} | case.more
    options |= {"segment_length": case.lengths} if case.lengths else {}
    export(source_of(case, checkout), path, **options)


def main() -> int:
    """Read the command line, export the cases, and print their names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the bundles are written")
    parser.add_argument(
        "--source", type=Path, default=Path(__file__).parents[2], help="checkout whose models are taken"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[case.name for case in OWN_CASES])
    options = parser.parse_args()
    checkout = options.source.resolve()
    sys.path[:0] = [str(checkout / "tests" / folder) for folder in ("", "helpers")]
    done = []
    for case in OWN_CASES:
        if options.only is None or case.name in options.only:
            print(f"{case.name}: {case.shows}", file=sys.stderr, flush=True)
            export_own(case, options.folder / f"{case.name}.txl", checkout)
            done.append(case.name)
    print(json.dumps(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
