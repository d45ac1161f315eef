"""Do a million random steps on the demo's model, while a bundle beside it is replaced and reloaded every minute.

    make demo MINUTES=1                                # trains the model
    python benchmarks/soak/soak.py --out soak               # --steps 1000000 --seconds SECONDS --seed 0 --threads 1
    python benchmarks/soak/soak.py --page soak/soak.json    # docs/measurements/soak.md and its pictures

A process without PyTorch does the steps; `soak_worker.py` has the kinds of steps and the measurements. This process
replaces the bundle beside it, as `export --force` does. At some moments, the worker stores the state of its stream.
Afterwards a fresh stream and the reference in float64 compute each stored state again, from only the last steps,
because a step depends only on the layers × (M + L) tokens before it. A second model, whose state never forgets, runs
beside its module in PyTorch (`soak_own.py`). Exit code 1 says that an error grew, memory leaked, or a result was wrong.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import soak_own
import soak_page
import torch
import txl_runtime
from numpy.typing import NDArray
from txl_export import export
from txl_export.bundle.placing import publishing
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import OracleStreams
from txl_runtime.ladder import no_drift_limit, rung
from txl_runtime.model import Model

from benchmarks.shared.models import TINY, random_bundle, random_state, weights_of
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import log

BATCH, LENGTHS, MEMORY = 2, (8, 1), 64
"""Batch size, segment lengths and memory rows of the bundles; small, so that steps are fast and soon forgotten."""
LOOKS = 20
QUICK_STEPS, QUICK_LOOKS, QUICK_INTERVAL = 10_000, 4, 0.2
OWN_SHARE = 10
"""The model that never forgets runs this fraction of the steps: a tenth."""
CHANGED = 0.02
"""The relative change of the weights between the two versions of the bundle."""


def make_bundles(folder: Path, checkpoint: Path | None) -> tuple[Path, Path]:
    """Export the bundle whose stream is tested, and a second version with changed weights; return both paths.

    Args:
        folder: the folder for the bundles.
        checkpoint: the demo's checkpoint; None for a tiny random model.
    """
    first, other = folder / "model.txl", folder / "other.txl"
    if checkpoint is None:
        for path, seed in ((first, 0), (other, 1)):
            random_bundle(path, TINY, (4, 1), 7, random_state(TINY, seed, 0.1), batch_size=BATCH)
        return first, other
    log(f"export {checkpoint} twice, once with other weights")
    stored = torch.load(checkpoint, weights_only=True)
    draws = torch.Generator().manual_seed(1)
    changed = {
        name: tensor * (1 + CHANGED * torch.randn(tensor.shape, generator=draws))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in stored["state"].items()
    }
    for path, state in ((first, stored["state"]), (other, changed)):
        export(
            state,
            path,
            config=stored["config"],
            segment_length=LENGTHS,
            memory_length=MEMORY,
            batch_size=BATCH,
            verify=False,
        )
    return first, other


def put(version: Path, target: Path) -> None:
    """Replace the bundle at `target` by a copy of the bundle `version`, as `export --force` does."""
    with publishing(target, force=True) as partial:
        for file in version.iterdir():
            (partial / file.name).write_bytes(file.read_bytes())


def work(folder: Path, versions: tuple[Path, Path], arguments: Any) -> dict[str, Any]:
    """Run the worker's process, and replace the bundle beside it at each request; return the worker's results.

    Args:
        folder: the folder for results.
        versions: both versions of the bundle.
        arguments: the command line.
    """
    beside, results = folder / "beside.txl", folder / "results"
    results.mkdir()
    put(versions[0], beside)
    options = {
        "bundle": str(versions[0]),
        "beside": str(beside),
        "folder": str(results),
        "looks": QUICK_LOOKS if arguments.quick else LOOKS,
        "interval": QUICK_INTERVAL if arguments.quick else arguments.interval,
        "steps": QUICK_STEPS if arguments.quick else arguments.steps,
        **{name: getattr(arguments, name) for name in ("seconds", "seed", "threads")},
    }
    command = [sys.executable, str(Path(__file__).with_name("soak_worker.py")), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            put(versions[1 - json.loads(line)["replace"] % 2], beside)
    if process.returncode:
        raise SystemExit(f"the soaked process ended with exit code {process.returncode}; its message is above")
    return dict(json.loads((results / "worker.json").read_text()))


def judge(model: Model, held: Path) -> dict[str, Any]:
    """Compare a stored state of the worker's stream with a fresh stream and the reference after the same tokens.

    Args:
        model: the model of the stream.
        held: the file that `Play.write_down` wrote.

    Returns:
        The step, and the errors by name.
    """
    m, result = model.manifest, np.load(held)
    count, probe = len(result["fill"]), result["tokens"]
    pasts = [np.split(result[f"past.{row}"], np.cumsum(result[f"cuts.{row}"])[:-1]) for row in range(count)]
    reference = OracleStreams(
        m, PaperModel(m.config, m.dialect, m.memory_length, weights_of(model), torch.float64), count
    )
    fresh = model.stream(count)
    longest = max(map(len, pasts))
    for place in range(-longest, 0):  # aligned at the end: the last segments of all sequences run together
        pieces = [past[place] if len(past) >= -place else past[0][:0] for past in pasts]
        counts = np.array([len(piece) for piece in pieces], np.int32)
        tokens = np.zeros((count, max(1, counts.max())), np.int32)
        for row, piece in enumerate(pieces):
            tokens[row, : len(piece)] = piece
        if counts.any():
            fresh.step(tokens, counts)
            reference.step(tokens, counts)
    expected = {name: rows for name, rows in reference.shown() if rows is not None}
    fill = [min(int(result[f"total.{row}"]), m.memory_length) for row in range(count)]
    errors = {
        "step": int(held.stem.removeprefix("held-")),
        "fill_exact": result["fill"].tolist() == fill,
        "memory": max(_relative(result[f"memory.{name}"], rows) for name, rows in expected.items()),
        "memory_fresh": max(_relative(result[f"memory.{name}"], rows) for name, rows in fresh.memory().items()),
        "logprobs_fresh": float(np.abs(result["logprobs"] - fresh.step(probe)).max(initial=0)),
    }
    text = np.abs(result["logprobs"] - reference.step(probe, np.full(count, probe.shape[1], np.int32)))
    return errors | {"logprobs": float(text.max()), "mean": float(text.mean())}


def _relative(result: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(result - expected).max(initial=0) / max(1.0, np.abs(expected).max(initial=0)))


def verdicts(document: dict[str, Any]) -> list[str]:
    """Return a sentence for each figure of the results that is over its limit; [] if there is none."""
    limits, held, own, reloads = rung("fp32", "cpu"), document["held"], document["own"], document["reloads"]
    wrong = [*reloads["wrong"], *(() if reloads.get("replacements") else ("the bundle was never replaced",))]
    assert limits.logprobs is not None
    assert limits.memory is not None
    for look in held:
        if not look["fill_exact"]:
            wrong.append(f"step {look['step']}: the stream remembers another number of tokens than it was fed")
        if max(look["logprobs"], look["logprobs_fresh"]) > limits.logprobs:
            wrong.append(f"step {look['step']}: log-probabilities are {look['logprobs']:.1e} from the reference")
        if max(look["memory"], look["memory_fresh"]) > limits.memory:
            wrong.append(f"step {look['step']}: the memory is {look['memory']:.1e} from the reference")
    means, quarter = [look["mean"] for look in held], max(len(held) // 4, 1)
    if np.mean(means[-quarter:]) > no_drift_limit(float(np.mean(means[:quarter]))):
        wrong.append(f"mean errors went from {np.mean(means[:quarter]):.1e} to {np.mean(means[-quarter:]):.1e}")
    if not own["count_exact"]:
        wrong.append("a count of steps is not their number")
    for look in own["looks"]:
        if any(ours > 2 * plain + 1e-6 for ours, plain in zip(look["bundle"], look["float32"], strict=True)):
            wrong.append(f"own step {look['step']}: {look['bundle']} from float64, PyTorch's float32 {look['float32']}")
    return wrong + soak_page.leaks(document["samples"])


def main() -> int:
    """Read the command line and run the test; return 1 if something is wrong. Or write the page of a stored run."""
    options = parser(
        __doc__, seconds=None, quick="10,000 operations on a tiny random model", threads="of the engine (default 1)"
    )
    options.set_defaults(threads=1)
    options.add_argument("--checkpoint", type=Path, default=Path("demo/model.pt"), help="of `make demo` (default)")
    options.add_argument("--steps", type=int, default=1_000_000, help="operations (default 1,000,000)")
    options.add_argument("--seconds", type=float, help="end after so many seconds, all steps done or not")
    options.add_argument("--interval", type=float, default=60.0, help="seconds between replacements (default 60)")
    options.add_argument("--seed", type=int, default=0, help="of every choice (default 0)")
    options.add_argument("--page", type=Path, metavar="FILE", help="write the page of a soak.json; nothing is run")
    arguments = options.parse_args()
    if arguments.page is not None:
        soak_page.write(json.loads(arguments.page.read_text()), arguments.out or soak_page.HOME)
        return 0
    if not arguments.quick and not arguments.checkpoint.is_file():
        options.error(f"{arguments.checkpoint} is not there, expected a trained model; run `make demo MINUTES=1` first")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))  # kept after an error, because its results took hours
    versions = make_bundles(folder, None if arguments.quick else arguments.checkpoint)
    document = work(folder, versions, arguments)
    model = txl_runtime.load(versions[0], backend="cpu", threads=arguments.threads)
    log("compare what was held with the reference")
    document["held"] = [judge(model, path) for path in sorted((folder / "results").glob("held-*.npz"))]
    steps = QUICK_STEPS if arguments.quick else arguments.steps
    document["own"] = soak_own.soak(folder, steps // OWN_SHARE, arguments.seed, arguments.threads)
    sizes = model.manifest.config
    document["model"] = f"`{model!r}`, {sizes.n_layer} layers, d_model {sizes.d_model}"
    document["errors"] = [look["logprobs"] for look in document["held"]]
    document["wrong"] = verdicts(document)
    finish("soak", arguments, soak_page.tables(document), document)
    shutil.rmtree(folder)
    for line in document["wrong"]:
        log(line)
    return 1 if document["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
