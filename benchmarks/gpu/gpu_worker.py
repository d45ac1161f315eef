"""Run one item of the GPU check in this process: export a model, run an engine, or run PyTorch.

    python benchmarks/gpu/gpu_worker.py export|engine|torch --bundle BUNDLE --name NAME --out FOLDER …

gpu_check.py starts this script. Each step's result is in FOLDER/NAME.jsonl before the next step begins. A failed step
does not prevent later ones, unless they need its result.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Ctrl-C during the imports ends the process at once: no step has begun, and NumPy would print a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import txl_runtime
from gpu_items import target_of
from gpu_journal import OK, Journal, without_cuda
from txl_runtime.bundle.engines.files import find_engines
from txl_runtime.bundle.engines.sidecar import Rounding
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import CheckError
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest

LENGTH = 64
QUICK_LENGTH, QUICK_MEMORY = 4, 12
CUTOFFS = (20000, 40000, 200000)
"""The ends of an adaptive softmax's clusters; ends beyond the vocabulary are left out."""
TEMPERATURE, TOP_K = 0.8, 50
"""The temperature and top-k with which the bundle and PyTorch draw."""
IN_PYTORCH = ("fp32", "fp16", "bf16")
"""The precisions of bundles in which PyTorch can compute too."""
WARM_UP, LEAST = 5, 10
"""The number of calls before timing, and the smallest number of timed calls."""


def timed(work: Callable[[], object], seconds: float, tokens: int) -> dict[str, Any]:
    """Time a function for some seconds, until its result is on the host; return p50 and p90 in ms, and tokens/s.

    `tokens` is the number of tokens of a call.
    """
    for _ in range(WARM_UP):
        work()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < LEAST:
        started = time.perf_counter()
        work()
        samples.append(1e3 * (time.perf_counter() - started))
    middle = median(samples)
    return {"p50": middle, "p90": sorted(samples)[int(0.9 * len(samples))], "tokens/s": tokens / middle * 1e3}


def large(vocabulary: int) -> dict[str, Any]:
    """Return the config of the random model: 12 layers, d_model 512, and a vocabulary of this size."""
    from benchmarks.shared.models import shape

    cutoffs = tuple(end for end in CUTOFFS if end < vocabulary)
    return shape(12, 512, 8, 64, 2048, vocabulary, cutoffs=cutoffs)


@contextmanager
def without_page() -> Iterator[None]:
    """Hide the library jinja2 inside the block, so that an export writes no page, a tiny bundle's largest file."""
    before = sys.modules.get("jinja2")
    sys.modules["jinja2"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["jinja2"]
        if before is not None:
            sys.modules["jinja2"] = before


def export(journal: Journal, given: argparse.Namespace) -> None:
    """Export a random model in the precision and with the B of the command line."""
    from benchmarks.shared.models import TINY, random_bundle

    values, length, memory = large(given.vocabulary), LENGTH, given.memory
    if given.quick:
        kept = {name: values[name] for name in ("vocab_size", "cutoffs")}
        values, length, memory = TINY | kept, QUICK_LENGTH, QUICK_MEMORY

    def run() -> None:
        given.bundle.parent.mkdir(parents=True, exist_ok=True)
        more = {"batch_size": given.batch, "precision": given.precision}
        with without_page() if given.quick else nullcontext():
            random_bundle(given.bundle, values, (length, 1), memory, **more)

    journal.run("export", run)


def not_verifiable() -> str:
    """Return a message that names the missing packages of verification, which engines do not need; "" if none is."""
    try:
        import txl_export.verifying  # noqa: F401
    except ModuleNotFoundError as error:
        absent = [name.replace("_", "-") for name in ("torch", "onnx_ir") if find_spec(name) is None]
        return f"verify needs {', '.join(absent) or error.name}; put what is missing into --site"
    return ""


def leave_records_to_engines(model: Model) -> None:
    """Let TensorRT-RTX record its own graphs in place of the loop; this has to be called before the first step."""
    for executable in cast(Any, model.backend).executables.values():
        executable.recordable = False
        strategies = executable._library.module.CudaGraphStrategy
        executable._config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE


def self_tested(copy: Path) -> Any:
    """Judge a copy of a bundle with rounded matrices by its self-test on the CPU, and return the figures.

    The parity ladder would take too long here.
    """
    from txl_engines.rounded_weights import Judged

    model = txl_runtime.load(copy, backend="cpu")
    model.backend.name = "rtx"
    outputs, state, *_ = run_selftest(model).largest.values()
    return Judged((outputs, state), {})


def engine(journal: Journal, given: argparse.Namespace) -> None:
    """Build, open, self-test, verify and time the engine of the command line."""
    path, update = given.bundle, None if given.update == "none" else given.update
    name: Any = target_of(given.engine)
    opened: list[Model] = []

    def build() -> Mapping[str, Any]:
        if name == "cpu":
            return {"engines": 0}
        from txl_engines.bundles import build_bundle, default_kinds

        # without a verification, only the programs that `txl-deploy build` compiles are needed
        kinds = None if given.segments else default_kinds(open_bundle(path, verify_files=False).manifest)
        weights: Any = "each" if given.engine == "rtx-own" else None
        rounding = given.engine.removeprefix("rtx-")
        rounded: Any = (rounding, self_tested) if rounding in get_args(Rounding) else None
        build_bundle(path, name, update=update, kinds=kinds, weights=weights, rounding=rounded)
        return {}

    def open_model() -> Mapping[str, Any]:
        opened.append(txl_runtime.load(path, backend=name, update=update))
        if given.engine == "rtx-alone":
            leave_records_to_engines(opened[0])
        return {"description": opened[0].backend.description, "update": opened[0].update}

    def selftest() -> Mapping[str, Any]:
        from txl_engines.recording import record_pass

        tested = run_selftest(opened[0])
        tested.require()
        record_pass(opened[0])
        return dict(tested.largest)

    def verified() -> Mapping[str, Any]:
        from txl_export.verifying import verify

        parity = verify(path, segments=given.segments, backend=name)
        if not parity.passed:
            failed = (gate for gate in parity.gates if gate.passed is False)
            raise CheckError(", ".join(f"{gate.name} {gate.value} (limit {gate.limit})" for gate in failed))
        return {"segments": given.segments}

    built = journal.run("build", build)
    if built.state != OK:
        _leave_out(journal, ("open", "self-test", "verify", "decode", "draw", "score"), "its engines were not built")
        return
    if journal.run("open", open_model).state != OK:
        _leave_out(journal, ("self-test", "verify", "decode", "draw", "score"), "it did not open")
        return
    model = opened[0]
    journal.run("self-test", selftest)
    if (
        name != "cpu"
        and (best := find_engines(open_bundle(path, verify_files=False), name)[0].program.update) != model.update
    ):
        journal.skip("verify", f"the bundle has engines of {best} memory too, and those would be verified")
    elif given.engine != name or not given.segments:
        journal.skip("verify", f"--engine {name} does, alone")
    elif absent := not_verifiable():
        journal.skip("verify", absent)
    else:
        journal.run("verify", verified)
    stream = model.stream()
    tokens = np.random.default_rng(0).integers(
        0, model.manifest.vocab_size, (model.batch_size, model.segment_lengths[0] + 1), np.int32
    )

    def decode() -> Mapping[str, Any]:
        while int(stream.fill.min()) < model.manifest.memory_length:
            stream.feed(tokens[:, :-1])
        return timed(lambda: stream.step(tokens[:, :1]), given.seconds, model.batch_size)

    def score() -> Mapping[str, Any]:
        figures = timed(lambda: stream.score(tokens), given.seconds, tokens[:, 1:].size)
        return figures | {"recorded": dict(getattr(stream.loop, "recorded", {}))}

    def draw() -> Mapping[str, Any]:
        return timed(
            lambda: next(stream.generate(tokens[:, :1], 1, temperature=TEMPERATURE, top_k=TOP_K, seed=0)),
            given.seconds,
            model.batch_size,
        )

    journal.run("decode", decode)
    journal.run("draw", draw)
    journal.run("score", score)


def torch(journal: Journal, given: argparse.Namespace) -> None:
    """Open and time PyTorch on the GPU with the bundle's weights, eager or compiled to CUDA graphs."""
    import torch

    steps = ("open", "decode", "draw", "score")
    if not torch.cuda.is_available():
        _leave_out(journal, steps, without_cuda(torch))
        return
    bundle = open_bundle(given.bundle, verify_files=False) if given.bundle.exists() else unexported(given)
    m = bundle.manifest
    if m.precision not in IN_PYTORCH:
        _leave_out(journal, steps, f"PyTorch computes in {', '.join(IN_PYTORCH)} here, the bundle in {m.precision}")
        return
    competitor: list[Any] = []
    tokens = np.random.default_rng(0).integers(0, m.vocab_size, (m.batch_size, m.segment_lengths[0] + 1), np.int32)

    def open_torch() -> Mapping[str, Any]:
        from gpu_competitors import RELEASED, TorchOnGpu, compare

        competitor.append(TorchOnGpu(bundle, given.engine, "cuda", TEMPERATURE, TOP_K))
        apart = compare(competitor[0], TorchOnGpu(bundle, RELEASED, "cuda"), tokens)
        return {"description": f"PyTorch {torch.__version__}"} | apart

    if journal.run("open", open_torch).state != OK:
        _leave_out(journal, steps[1:], "it did not open")
        return
    inner = competitor[0]
    journal.run("decode", lambda: timed(lambda: inner.logprobs(tokens[:, :1]), given.seconds, m.batch_size))
    journal.run("draw", lambda: timed(lambda: inner.draw(tokens[:, :1]), given.seconds, m.batch_size))
    journal.run("score", lambda: timed(lambda: inner.score(tokens), given.seconds, tokens[:, 1:].size))


def unexported(given: argparse.Namespace) -> Any:
    """Return the parts of a bundle that PyTorch's forms need, with the weights that `export` would have used."""
    from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

    from benchmarks.shared.models import deviation, random_state

    values, competitors = large(given.vocabulary), cast(Any, import_module("gpu_competitors"))
    state = random_state(values, deviation=deviation(values["d_model"]))
    competitors.weights_of_bundle = lambda *_: state
    config = ModelConfig(**{name: values[name] for name in ModelConfig.__struct_fields__ if name in values})
    sizes: dict[str, Any] = {"batch_size": given.batch, "segment_lengths": (LENGTH, 1)}
    sizes |= {"memory_length": given.memory, "precision": "fp32"}
    manifest = SimpleNamespace(config=config, dialect=Dialect(), vocab_size=given.vocabulary, weights="", **sizes)
    return SimpleNamespace(manifest=manifest, file=Path)


def _leave_out(journal: Journal, steps: tuple[str, ...], reason: str) -> None:
    for step in steps:
        journal.skip(step, reason)


def main() -> int:
    """Run the item of the command line; return 130 if it was stopped, else 0: failed steps are in the file."""
    kinds = {"export": export, "engine": engine, "torch": torch}
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    options.add_argument("kind", choices=kinds)
    options.add_argument("--bundle", type=Path, required=True)
    options.add_argument("--name", required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--engine", default="none")
    options.add_argument("--precision", default="fp32")
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--segments", type=int, default=12)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--update", default="none")
    options.add_argument("--memory", type=int, default=640)
    options.add_argument("--vocabulary", type=int, default=204)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--stopped", default="", help="what a step says that SIGTERM ends")
    given = options.parse_args()
    print(f"--- {given.name}", flush=True)
    journal = Journal(given.name, given.out)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt(given.stopped)

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, stop)
        kinds[given.kind](journal, given)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
