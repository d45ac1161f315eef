"""Prove that a refactoring changes no bit: record what two checkouts compute, then compare the records.

    python benchmarks/bit_equality.py record OLD --oracle tests/fixtures/oracle --demo demo/model.pt --source ../old
    python benchmarks/bit_equality.py record NEW --oracle tests/fixtures/oracle --demo demo/model.pt --snapshots OLD
    python benchmarks/bit_equality.py compare OLD NEW

It uses the public contract alone, the command line and what `txl_runtime` documents, so that one and the same file runs
on either side. Every engine gets one thread, because sums depend on how threads cut them. Durations are left out, and
so is the manifest's provenance, which names sources and versions and is no part of the function. Record both sides on
one machine: other processors have other kernels, which round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

FIGURES = "verification figures"
"""Numbers that judge a bundle and are no part of it: report.json, and `parity` wherever it is written or printed."""
RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""How far such figures may be apart, when a divergence is computed in another way, to count as explained."""
EXPLAINED = {
    r"backends?(_notes)?\.": "what is said of backends that are not taken",
    r"(manifest\.)?joint ": "a field that bundles without it have as well",
    r"(commits|lengths|streams) \('absent'": "what inspect says since format 2",
    r"bytes ": "size of a bundle whose report.json holds other figures",
}
"""Places of the command line's documents that may differ, as regular expressions, and what stands there."""
UNSTABLE = frozenset({"seconds", "provenance", "bundle"})
"""Keys of JSON documents that differ from run to run: durations, sources, and where a bundle lies."""
DOCUMENTS = ("manifest.json", "report.json", "engines/*/*.json")
"""Files of a bundle that are compared as JSON, because they hold such keys or figures; all others by their bytes."""


@dataclass(frozen=True)
class Case:
    """One export: a checkpoint below the oracle's folder (None for the demo), and the options of `export`.

    A checkpoint with a suffix or a folder is taken as it is; any other is a state dict with a config, from an .npz.
    """

    name: str
    checkpoint: str | None
    options: str
    targets: str = ""


OWN = "--segment-length 5 --segment-length 1 --memory-length 8"
FREE = "--clamp-length 0 --no-same-length"
CASES = (
    Case("k01-base", "kimiyoung/k01_base.model.zip213.pt", f"{OWN} {FREE} --batch-size 2 --no-verify"),
    Case("k03-same-length", "kimiyoung/k03_same_length", f"{OWN} --clamp-length 0 --same-length --no-verify"),
    Case("k05-clamp-hidden", "kimiyoung/k05_clamp4", f"{OWN} --clamp-length 4 --memory hidden --no-verify"),
    Case("k12-int4", "kimiyoung/k12_not_tied.model.zip213.pt", f"{OWN} {FREE} --precision int4 --no-verify"),
    Case("k20-adaptive", "kimiyoung/k20_adp_div1", f"{OWN} {FREE} --batch-size 3 --no-verify"),
    Case("k30-adaptive-2", "kimiyoung/k30_adp_div2.model.zip213.pt", f"{OWN} {FREE} --batch-size 2"),
    Case("k50-attention-1", "kimiyoung/k50_attn1.model.zip213.pt", f"{OWN} {FREE} --batch-size 2 --no-verify"),
    Case("k70-attention-3", "kimiyoung/k70_attn3.model.zip213.pt", f"{OWN} {FREE} --memory hidden --no-verify"),
    Case("n01-same-clamp", "nvidia/n01_base.checkpoint_best.pt", f"{OWN} --same-length --clamp-length 6 --no-verify"),
    Case("n12-fp16", "nvidia/n12_adp_div2.checkpoint_best.pt", f"{OWN} {FREE} --precision fp16 --no-verify"),
    Case("h01-zero-start", "hf/h01_base", f"{OWN} {FREE} --batch-size 2"),
    Case("h12-int8", "hf/h12_adp_div2.safetensors", f"{OWN} {FREE} --batch-size 2 --precision int8 --no-verify"),
    Case("x01-cntxl", "extra/x01_cntxl_prompt", "--segment-length 6 --batch-size 2 --no-verify"),
    Case("x10-remixl", "extra/x10_remixl", f"{OWN} --clamp-length 0 --same-length --batch-size 2 --no-verify"),
    Case("x20-fastai", "extra/x20_fastai_xl", "--segment-length 5 --segment-length 2 --memory-length 8 --no-verify"),
    Case("demo", None, "--no-verify"),
    Case("demo-fp16", None, "--precision fp16 --no-verify", "rtx --sm 86,89"),
    Case("demo-int8-batch", None, "--precision int8 --batch-size 3 --segment-length 16 --no-verify"),
)


def record(options: argparse.Namespace) -> int:
    """Export every case with the packages of `--source`, run it, and write what came out to OUT/record.json."""
    out, source = options.out.resolve(), options.source.resolve()
    for folder in ("bundles", "checkpoints", "results", "snapshots"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for case in CASES:
        if (case.checkpoint is None and options.demo is None) or (options.only and case.name not in options.only):
            continue
        print(f"{case.name}: {case.options}", file=sys.stderr, flush=True)
        found[case.name] = _record_case(case, options, _Side(source, out))
    names = ("numpy", "onnxruntime", "torch", "onnx", "onnxscript", "onnx-ir")
    conditions = {"python": platform.python_version()} | {name: version(name) for name in names}
    (out / "record.json").write_text(json.dumps({"conditions": conditions, "cases": found}, indent=1) + "\n")
    return 0


def environment_of(source: Path) -> dict[str, str]:
    """The environment of a process that is to use a checkout's packages, whatever is installed."""
    roots = (source, source / "export", source / "runtime")
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(root.resolve()) for root in roots)}


def runtime_of(source: Path) -> Any:
    """The module `txl_runtime`, which has to be the checkout's own."""
    import txl_runtime

    if not Path(txl_runtime.__file__).resolve().is_relative_to(source.resolve()):
        raise SystemExit(f"txl_runtime comes from {txl_runtime.__file__}, expected a package of {source}")
    return txl_runtime


@dataclass(frozen=True)
class _Side:
    """A checkout and where its record is written; runs Python with the checkout's packages."""

    source: Path
    out: Path

    def python(self, *arguments: object) -> str:
        """What a Python process prints on stdout; it sees no other checkout."""
        environment = environment_of(self.source) | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=self.out, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stderr}")
        return done.stdout

    def cli(self, *arguments: object) -> Any:
        """The JSON document that a command of `txl-deploy` prints."""
        return _stable(json.loads(self.python("-m", "txl_deploy", *arguments, "--json")), str(self.out))


def _record_case(case: Case, options: argparse.Namespace, side: _Side) -> dict[str, Any]:
    bundle = side.out / "bundles" / f"{case.name}.txl"
    tokens = side.out / "checkpoints" / "tokens.npy"
    np.save(tokens, np.arange(300) * 7 % 40)
    given = _checkpoint(case, options, side.out)
    documents = {"export": side.cli("export", *given, "-o", bundle, *case.options.split(), "--force")}
    if case.targets:
        documents["build"] = side.cli("build", bundle, "--target", *case.targets.split())
    prompt = ("--prompt-tokens", "1,2,3,4,5,6,7", "--max-new-tokens", 20, "--seed", 3, "--threads", 1)
    documents["generate"] = side.cli("generate", bundle, *prompt, "--temperature", 0.8, "--top-p", 0.9)
    documents["score"] = side.cli("score", bundle, tokens, "--threads", 1)
    documents["selftest"] = side.cli("selftest", bundle, "--threads", 1)
    documents["inspect"] = side.cli("inspect", bundle)
    others = ["--snapshots", options.snapshots.resolve() / "snapshots"] if options.snapshots else []
    items = side.python(Path(__file__).resolve(), "run", bundle, side.out, "--source", side.source, *others)
    read = {path for pattern in DOCUMENTS for path in bundle.glob(pattern)}
    documents |= {path.relative_to(bundle).as_posix(): _stable(json.loads(path.read_text())) for path in read}
    paths = (path for path in sorted(bundle.rglob("*")) if path.is_file() and path not in read)
    hashes = {f"file {path.relative_to(bundle)}": hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return {"documents": documents, "hashes": hashes | json.loads(items)}


def _checkpoint(case: Case, options: argparse.Namespace, out: Path) -> list[object]:
    """The arguments of `export` that say what to read."""
    if case.checkpoint is None:
        return [options.demo.resolve()]
    source = options.oracle.resolve() / case.checkpoint
    if source.suffix == ".pt" or (source / "config.json").exists():
        return [source]
    import torch

    values, facts = np.load(f"{source}.npz"), json.loads(Path(f"{source}.json").read_text())
    state = {name[3:]: torch.from_numpy(values[name]) for name in values.files if name.startswith("sd/")}
    path = out / "checkpoints" / f"{case.name}.pt"
    torch.save(state, path)
    path.with_suffix(".json").write_text(json.dumps(facts.get("ctor") or facts["config"]))
    return [path, "--config", path.with_suffix(".json")]


def _stable(document: Any, folder: str = "") -> Any:
    """A JSON document without what differs from run to run, and without where the record lies."""
    if isinstance(document, dict):
        left_out = {key for key in document if key in UNSTABLE or any(Path(key).match(name) for name in DOCUMENTS)}
        return {key: _stable(value, folder) for key, value in document.items() if key not in left_out}
    if isinstance(document, list):
        return [_stable(value, folder) for value in document]
    return document.replace(folder, "OUT") if isinstance(document, str) and folder else document


def run(options: argparse.Namespace) -> int:
    """Everything that streams do, with every update rule, both ways of loading; prints hashes as JSON."""
    txl_runtime = runtime_of(options.source)
    manifest = json.loads((options.bundle / "manifest.json").read_text())
    arrays: dict[str, Any] = {}
    for update in sorted({program["update"] for program in manifest["programs"]} - {"none"}):
        for lean in (False, True):
            model = txl_runtime.load(options.bundle, backend="cpu", threads=1, update=update, lean=lean)
            name = f"{update}{', lean' if lean else ''}"
            snapshot = f"{options.bundle.stem}.{name.replace(', ', '-')}.safetensors"
            others = options.snapshots / snapshot if options.snapshots else None
            scenes = _Scenes(model, manifest, options.out / "snapshots" / snapshot, others)
            arrays |= {f"{name}: {item}": array for item, array in scenes.items()}
    np.savez_compressed(options.out / "results" / f"{options.bundle.stem}.npz", **arrays)
    print(json.dumps({item: _hash(array) for item, array in arrays.items()}))
    return 0


def _hash(array: Any) -> str:
    header = f"{array.dtype} {list(array.shape)} ".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array).tobytes()).hexdigest()


class _Scenes:
    """What streams of one loaded model are put through."""

    def __init__(self, model: Any, manifest: Mapping[str, Any], snapshot: Path, others: Path | None) -> None:
        self._model, self._snapshot, self._others = model, snapshot, others
        self._b, self._v = manifest["batch_size"], model.vocab_size
        self._longest = max(program["segment_length"] for program in manifest["programs"])
        self._memory_length = model.memory_length

    def items(self) -> Iterator[tuple[str, Any]]:
        """Name and array of everything that comes out."""
        for scene in (self._step, self._feed, self._generate, self._rows, self._states):
            for item, array in scene():
                yield f"{scene.__name__[1:]}: {item}", array

    def _tokens(self, length: int, seed: int, rows: int | None = None) -> Any:
        shape = (rows or self._b, length)
        return np.random.default_rng(seed).integers(0, self._v, shape, dtype=np.int32)

    def _lengths(self, length: int, seed: int) -> Any:
        """Lengths from idle to full; the last sequence always has something."""
        counts = np.random.default_rng(seed).integers(0, length + 1, self._b)
        counts[-1] = max(1, counts[-1])
        return counts

    def _after(self, stream: Any, name: str) -> Iterator[tuple[str, Any]]:
        yield f"{name}, fill", stream.fill
        for layer, rows in stream.memory().items():
            yield f"{name}, memory {layer}", rows

    def _step(self) -> Iterator[tuple[str, Any]]:
        stream = self._model.stream()
        shorter = max(1, self._longest // 2)
        for index, length in enumerate((1, self._longest, shorter, 1, 1, self._longest, 1)):
            yield f"{index}", stream.step(self._tokens(length, index))
        yield from self._after(stream, "whole segments")
        for index in range(6 + 3 * self._memory_length // self._longest):  # several laps of a ring
            length = (self._longest, shorter, 1)[index % 3]
            yield f"partial {index}", stream.step(self._tokens(length, index), self._lengths(length, index))
        yield from self._after(stream, "partial segments")

    def _feed(self) -> Iterator[tuple[str, Any]]:
        stream, length = self._model.stream(), 2 * self._memory_length + 3 * self._longest + 2
        yield "feed", stream.feed(self._tokens(length, 20))
        yield "feed with lengths", stream.feed(self._tokens(length, 21), self._lengths(length, 21))
        yield from self._after(stream, "fed")
        yield "score", stream.score(self._tokens(length, 22))
        yield from self._after(stream, "scored")
        if self._b > 1:
            yield "one sequence of several", self._model.stream(1).feed(self._tokens(length, 23, 1))

    def _generate(self) -> Iterator[tuple[str, Any]]:
        length = 2 * self._longest + 1
        ways: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0},
            "temperature 1": {"seed": 5},
            "temperature 0.8": {"temperature": 0.8, "seed": 6},
            "top-k": {"top_k": 5, "seed": 7},
            "top-k, warm": {"top_k": 9, "temperature": 1.3, "seed": 8},
            "top-p": {"top_p": 0.9, "seed": 9},
            "top-p, cool": {"top_p": 0.6, "temperature": 0.7, "seed": 10},
            "stop tokens": {"seed": 11, "stop_tokens": list(range(0, self._v, 7))},
            "lengths": {"seed": 12, "lengths": np.arange(self._b) % length + 1},
        }
        for index, (name, how) in enumerate(ways.items()):
            stream = self._model.stream()
            yield name, np.array(list(stream.generate(self._tokens(length, 30 + index), 25, **how)))
            yield from self._after(stream, name)

    def _rows(self) -> Iterator[tuple[str, Any]]:
        stream, longest = self._model.stream(), self._longest
        stream.feed(self._tokens(2 * longest + self._memory_length, 40))
        stream.reset([self._b - 1])
        yield from self._after(stream, "one reset")
        yield "step after one reset", stream.step(self._tokens(longest, 41), self._lengths(longest, 41))
        order = [index // 2 for index in range(self._b)][::-1]
        stream.select(order)
        yield from self._after(stream, "selected")
        yield "step after select", stream.step(self._tokens(1, 42))
        stream.select([self._b - 1])
        yield "feed of one left", stream.feed(self._tokens(longest + 1, 43, 1))
        stream.select([0] * self._b)
        yield "feed of one become many", stream.feed(self._tokens(longest + 1, 44))
        stream.reset()
        yield "step after reset", stream.step(self._tokens(longest, 45))
        yield from self._after(stream, "all reset")

    def _states(self) -> Iterator[tuple[str, Any]]:
        from safetensors.numpy import load_file
        from txl_runtime import StreamState

        stream = self._model.stream()
        length = self._memory_length + self._longest + 3
        stream.feed(self._tokens(length, 50), self._lengths(length, 50))
        stream.step(self._tokens(1, 51))
        stream.snapshot().save(self._snapshot)
        for name, tensor in load_file(self._snapshot).items():
            yield f"file, {name}", tensor
        yield "continued at once", self._continued(stream)
        stream.restore(StreamState.load(self._snapshot))
        yield "continued in the same stream", self._continued(stream)
        fresh = self._model.stream()
        fresh.restore(StreamState.load(self._others or self._snapshot))  # with --snapshots the other record's
        yield "continued in a fresh stream", self._continued(fresh)
        yield from self._after(fresh, "continued in a fresh stream")

    def _continued(self, stream: Any) -> Any:
        fed = stream.feed(self._tokens(3 * self._longest + 1, 52))
        return np.concatenate([fed, stream.step(self._tokens(1, 53))], axis=1)


def compare(options: argparse.Namespace) -> int:
    """Print a table of what is equal and what differs; exit code 1 where a difference is not explained."""
    old, new = (json.loads((folder / "record.json").read_text()) for folder in (options.old, options.new))
    if old["conditions"] != new["conditions"]:
        print(f"The records were made under different conditions:\n  {old['conditions']}\n  {new['conditions']}\n")
    rows: list[tuple[str, str, str]] = []
    for case in sorted(old["cases"].keys() | new["cases"].keys()):
        if case not in old["cases"] or case not in new["cases"]:
            rows.append((case, "case", "differs: only one record has it"))
            continue
        one, two = old["cases"][case], new["cases"][case]
        for name in sorted(one["documents"].keys() | two["documents"].keys()):
            verdict = _document(one["documents"].get(name), two["documents"].get(name), name)
            rows.append((case, name, verdict))
        results = [folder / "results" / f"{case}.npz" for folder in (options.old, options.new)]
        rows += [(case, item, verdict) for item, verdict in _arrays(one["hashes"], two["hashes"], results)]
    for case, item, verdict in rows:
        if options.all or verdict != "equal":
            print(f"{case:18} {item:60} {verdict}")
    differing = sum(verdict.startswith("differs") for *_, verdict in rows)
    explained = sum(verdict.startswith("explained") for *_, verdict in rows)
    equal = len(rows) - differing - explained
    print(f"{len(rows)} items: {equal} equal, {explained} explained, {differing} differ")
    return 1 if differing or not rows else 0


def _arrays(old: Mapping[str, str], new: Mapping[str, str], results: list[Path]) -> Iterator[tuple[str, str]]:
    """Files and arrays by hash; of arrays that differ, by how much."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) == new.get(name):
            yield name, "equal"
        elif name not in old or name not in new:
            yield name, "differs: only one record has it"
        elif name.startswith("file "):
            yield name, "differs: other bytes"
        else:
            one, two = (np.load(path)[name] for path in results)
            if (one.shape, one.dtype) != (two.shape, two.dtype):
                yield name, f"differs: {one.dtype} {list(one.shape)} became {two.dtype} {list(two.shape)}"
            else:
                apart = float(np.abs(one.astype(np.float64) - two.astype(np.float64)).max(initial=0))
                yield name, f"differs: {int((one != two).sum())} of {one.size} values, by at most {apart:.3g}"


def _document(old: Any, new: Any, name: str) -> str:
    """JSON documents: the places that differ, and of figures of verification by how much."""
    found = list(_differences(_in_one_format(old), _in_one_format(new), "", name == "report.json"))
    if not found:
        return "equal"
    beyond, reasons = [], set()
    for place in (place for place, apart in found if apart is None):
        told = [reason for pattern, reason in EXPLAINED.items() if re.match(pattern, place)]
        reasons.update(told)
        beyond += [] if told else [place]
    if beyond:
        return f"differs: {', '.join(beyond[:5])}{' …' if len(beyond) > 5 else ''}"
    worst = max((apart for _, apart in found if apart is not None), default=None)
    reasons |= set() if worst is None else {f"{FIGURES}, relative difference at most {worst:.1e}"}
    return f"explained: {'; '.join(sorted(reasons))}"


def _in_one_format(document: Any) -> Any:
    """A manifest of format 1, alone or in another document, as the runtime takes it over."""
    from txl_runtime.bundle.format1 import Format1
    from txl_runtime.bundle.manifest import FORMAT_VERSION, Manifest

    if not isinstance(document, dict):
        return document
    if document.get("format") == "txl-deploy.bundle" and document["format_version"].startswith("1."):
        taken_over = Manifest(format_version=FORMAT_VERSION, **msgspec.convert(document, Format1).upgraded())
        plain = json.loads(msgspec.json.encode(taken_over))
        return {name: value for name, value in plain.items() if name not in UNSTABLE}
    return {name: _in_one_format(value) for name, value in document.items()}


def _differences(old: Any, new: Any, place: str, figures: bool) -> Iterator[tuple[str, float | None]]:
    """Where two documents differ; with the relative difference if that is one of explained figures, else None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            pair = (old.get(key, "absent"), new.get(key, "absent"))
            yield from _differences(*pair, f"{place}.{key}".lstrip("."), figures or key == "parity")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(*pair, f"{place}[{index}]", figures)
    elif old != new:
        if figures and isinstance(old, float) and isinstance(new, float):
            apart, larger = abs(old - new), max(abs(old), abs(new))
            if apart <= max(RELATIVE * larger, ABSOLUTE):
                yield place, apart / larger
                return
        yield f"{place} ({old!r} became {new!r})"[:160], None


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record", help="export and run every case")
    one.add_argument("out", type=Path, metavar="OUT", help="folder for bundles, snapshots, results and record.json")
    one.add_argument("--oracle", type=Path, required=True, help="folder of the oracle's cases")
    one.add_argument("--demo", type=Path, help="the checkpoint of `make demo`; without it its cases are left out")
    one.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="checkout whose packages are used")
    one.add_argument("--snapshots", type=Path, metavar="OLD", help="record whose snapshots fresh streams continue")
    one.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES])
    one.set_defaults(run=record)
    one = commands.add_parser("run", help="what `record` starts per bundle")
    one.add_argument("bundle", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--source", type=Path, required=True)
    one.add_argument("--snapshots", type=Path)
    one.set_defaults(run=run)
    one = commands.add_parser("compare", help="compare two records")
    one.add_argument("old", type=Path, metavar="OLD")
    one.add_argument("new", type=Path, metavar="NEW")
    one.add_argument("--all", action="store_true", help="list what is equal, too")
    one.set_defaults(run=compare)
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
