"""Prove that a refactoring changes no bit: record what two checkouts compute, then compare the records.

    python benchmarks/compare/bit_equality.py record OLD --own --oracle FOLDER --demo demo/model.pt --source ../old
    python benchmarks/compare/bit_equality.py record NEW --own --oracle FOLDER --demo demo/model.pt --snapshots OLD
    python benchmarks/compare/bit_equality.py compare OLD NEW

`--oracle` records the Transformer-XLs of a folder, `--demo` records the Transformer-XL of `make demo`, and `--own`
records the models of `own_cases.py`, which are PyTorch modules with steps of their own. A kind that is not asked for is
left out. `scenes.py` has the operations that are run on streams of each model.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import own_cases
from own_cases import ENGINES, OWN_CASES
from scenes import Scenes

FIGURES = "verification figures"
"""The words with which `compare` reports numbers that judge a bundle: the numbers of report.json and of `parity`."""
RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Two such numbers may differ by at most this, relative or absolute, because their sums may run in a new order."""
EXPLAINED = {
    r"backends?(_notes)?\.": "what is said of backends that are not taken",
    r"(manifest\.)?joint ": "a field that bundles without it have as well",
    r"(commits|lengths|streams) \('absent'": "what inspect says since format 2",
    r"bytes ": "size of a bundle whose report.json holds other figures",
}
"""Places of JSON documents at which two checkouts may differ: regular expressions of the places, and the reasons."""
UNSTABLE = frozenset({"seconds", "provenance", "bundle"})
"""Keys of JSON documents whose values differ from run to run: durations, sources, and the bundle's path."""
DOCUMENTS = ("manifest.json", "report.json", "engines/*/*.json")
"""Files of a bundle that are compared as JSON, since some of their values may differ; others are compared by bytes."""


@dataclass(frozen=True)
class Case:
    """One export: a checkpoint's path in the folder of `--oracle` (None for `--demo`), and the options of `export`.

    A `.pt` file or a folder with a config.json is exported as it is. A path without either names an .npz file with a
    state dict, and a .json file with its config.
    """

    name: str
    checkpoint: str | None
    options: str
    targets: tuple[str, ...] = ()


OWN = "--segment-length 5 --segment-length 1 --memory-length 8"
FREE = "--clamp-length 0 --no-same-length"
CASES = (
    Case("k01-base", "kimiyoung/k01_base.model.zip213.pt", f"{OWN} {FREE} --batch-size 2 --no-verify", ENGINES),
    Case("k03-same-length", "kimiyoung/k03_same_length", f"{OWN} --clamp-length 0 --same-length --no-verify"),
    Case("k05-clamp-hidden", "kimiyoung/k05_clamp4", f"{OWN} --clamp-length 4 --memory hidden --no-verify"),
    Case("k12-int4", "kimiyoung/k12_not_tied.model.zip213.pt", f"{OWN} {FREE} --precision int4 --no-verify"),
    Case("k20-adaptive", "kimiyoung/k20_adp_div1", f"{OWN} {FREE} --batch-size 3 --no-verify"),
    Case("k30-adaptive-2", "kimiyoung/k30_adp_div2.model.zip213.pt", f"{OWN} {FREE} --batch-size 2"),
    Case("k50-attention-1", "kimiyoung/k50_attn1.model.zip213.pt", f"{OWN} {FREE} --batch-size 2 --no-verify"),
    Case("k70-attention-3", "kimiyoung/k70_attn3.model.zip213.pt", f"{OWN} {FREE} --memory hidden --no-verify"),
    Case("n01-same-clamp", "nvidia/n01_base.checkpoint_best.pt", f"{OWN} --same-length --clamp-length 6 --no-verify"),
    Case("n12-fp16", "nvidia/n12_adp_div2.checkpoint_best.pt", f"{OWN} {FREE} --precision fp16 --no-verify", ENGINES),
    Case("h01-zero-start", "hf/h01_base", f"{OWN} {FREE} --batch-size 2"),
    Case("h12-int8", "hf/h12_adp_div2.safetensors", f"{OWN} {FREE} --batch-size 2 --precision int8 --no-verify"),
    Case("x01-cntxl", "extra/x01_cntxl_prompt", "--segment-length 6 --batch-size 2 --no-verify"),
    Case("x10-remixl", "extra/x10_remixl", f"{OWN} --clamp-length 0 --same-length --batch-size 2 --no-verify"),
    Case("x20-fastai", "extra/x20_fastai_xl", "--segment-length 5 --segment-length 2 --memory-length 8 --no-verify"),
    Case("demo", None, "--no-verify"),
    Case("demo-fp16", None, "--precision fp16 --no-verify", ("rtx --sm 86,89",)),
    Case("demo-int8-batch", None, "--precision int8 --batch-size 3 --segment-length 16 --no-verify"),
)


def record(options: argparse.Namespace) -> int:
    """Export every case with the packages of `--source`, run it, and write all results to OUT/record.json."""
    out, source = options.out.resolve(), options.source.resolve()
    for folder in ("bundles", "checkpoints", "results", "snapshots"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    (out / "record.json").unlink(missing_ok=True)  # an earlier run's; this run may fail before it writes its own
    results: dict[str, Any] = {}
    side, only = _Side(source, out), options.only
    for case in CASES:
        if (options.demo if case.checkpoint is None else options.oracle) and (not only or case.name in only):
            print(f"{case.name}: {case.options}", file=sys.stderr, flush=True)
            results[case.name] = _record_case(case, options, side)
    own = {case.name: case for case in OWN_CASES if options.own and (not only or case.name in only)}
    if own:
        print(f"export {', '.join(own)}", file=sys.stderr, flush=True)
        side.python(Path(own_cases.__file__).resolve(), out / "bundles", "--source", source, "--only", *own)
    for name, one in own.items():
        print(f"{name}: {one.shows}", file=sys.stderr, flush=True)
        results[name] = _record_bundle(name, one.targets, options, side)
    names = ("numpy", "onnxruntime", "torch", "onnx", "onnxscript", "onnx-ir")
    conditions = {"python": platform.python_version()} | {name: version(name) for name in names}
    (out / "record.json").write_text(json.dumps({"conditions": conditions, "cases": results}, indent=1) + "\n")
    return 0


def environment_of(source: Path) -> dict[str, str]:
    """Return the environment of a process that imports a checkout's packages before any installed ones.

    This checkout comes last on the path, for checkouts that lack the package `benchmarks.shared`.
    """
    roots = (source, source / "export", source / "runtime", Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(root.resolve()) for root in roots)}


def runtime_of(source: Path) -> Any:
    """Import `txl_runtime`, check that its file lies in the checkout, and return the module."""
    import txl_runtime

    if not Path(txl_runtime.__file__).resolve().is_relative_to(source.resolve()):
        raise SystemExit(f"txl_runtime comes from {txl_runtime.__file__}, expected a package of {source}")
    return txl_runtime


@dataclass(frozen=True)
class _Side:
    """One of the two checkouts, with the folder for its record."""

    source: Path
    out: Path

    def python(self, *arguments: object) -> str:
        """Run a Python process that imports this checkout's packages, and return its stdout."""
        environment = environment_of(self.source) | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=self.out, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stderr}")
        return done.stdout

    def cli(self, *arguments: object) -> Any:
        """Return the JSON document that a command of `txl-deploy` prints."""
        return _stable(json.loads(self.python("-m", "txl_deploy", *arguments, "--json")), str(self.out))


def _record_case(case: Case, options: argparse.Namespace, side: _Side) -> dict[str, Any]:
    """Export a Transformer-XL on the command line, and record its documents and all results of `_record_bundle`."""
    bundle = side.out / "bundles" / f"{case.name}.txl"
    tokens = side.out / "checkpoints" / "tokens.npy"
    np.save(tokens, np.arange(300) * 7 % 40)
    given = _checkpoint(case, options, side.out)
    documents = {"export": side.cli("export", *given, "-o", bundle, *case.options.split(), "--force")}
    prompt = ("--prompt-tokens", "1,2,3,4,5,6,7", "--max-new-tokens", 20, "--seed", 3, "--threads", 1)
    documents["generate"] = side.cli("generate", bundle, *prompt, "--temperature", 0.8, "--top-p", 0.9)
    documents["score"] = side.cli("score", bundle, tokens, "--threads", 1)
    result = _record_bundle(case.name, case.targets, options, side)
    return {**result, "documents": documents | result["documents"]}


def _record_bundle(name: str, targets: Sequence[str], options: argparse.Namespace, side: _Side) -> dict[str, Any]:
    """Record the files of a bundle and of its engines, the output of commands on it, and the results of its streams."""
    bundle, documents = side.out / "bundles" / f"{name}.txl", {}
    for target in targets:
        documents[f"build {target.split()[0]}"] = side.cli("build", bundle, "--target", *target.split())
    if next(bundle.glob("selftest.*"), None):  # bundles of graphs written by hand have no vectors for a self-test
        documents["selftest"] = side.cli("selftest", bundle, "--backend", "cpu", "--threads", 1)
    documents["inspect"] = side.cli("inspect", bundle)
    others = ["--snapshots", options.snapshots.resolve() / "snapshots"] if options.snapshots else []
    items = side.python(Path(__file__).resolve(), "run", bundle, side.out, "--source", side.source, *others)
    read = {path for pattern in DOCUMENTS for path in bundle.glob(pattern)}
    documents |= {path.relative_to(bundle).as_posix(): _stable(json.loads(path.read_text())) for path in read}
    paths = (path for path in sorted(bundle.rglob("*")) if path.is_file() and path not in read)
    hashes = {f"file {path.relative_to(bundle)}": hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return {"documents": documents, "hashes": hashes | json.loads(items)}


def _checkpoint(case: Case, options: argparse.Namespace, out: Path) -> list[object]:
    """Return the arguments of `export` that name a case's checkpoint, e.g. ["k01.pt", "--config", "k01.json"]."""
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
    """Return a JSON document without the values that differ from run to run; "OUT" replaces the record's folder."""
    if isinstance(document, dict):
        left_out = {key for key in document if key in UNSTABLE or any(Path(key).match(name) for name in DOCUMENTS)}
        return {key: _stable(value, folder) for key, value in document.items() if key not in left_out}
    if isinstance(document, list):
        return [_stable(value, folder) for value in document]
    return document.replace(folder, "OUT") if isinstance(document, str) and folder else document


def run(options: argparse.Namespace) -> int:
    """Run every operation of streams, for every update rule, with and without `lean`; print the hashes as JSON."""
    txl_runtime = runtime_of(options.source)
    manifest = json.loads((options.bundle / "manifest.json").read_text())
    arrays: dict[str, Any] = {}
    for update in sorted({program["update"] for program in manifest["programs"]} - {"none"}):
        for lean in (False, True):
            model = txl_runtime.load(options.bundle, backend="cpu", threads=1, update=update, lean=lean)
            name = f"{update}{', lean' if lean else ''}"
            snapshot = f"{options.bundle.stem}.{name.replace(', ', '-')}.safetensors"
            others = options.snapshots / snapshot if options.snapshots else None
            scenes = Scenes(model, options.out / "snapshots" / snapshot, others)
            arrays |= {f"{name}: {item}": array for item, array in scenes.items()}
    np.savez_compressed(options.out / "results" / f"{options.bundle.stem}.npz", **arrays)
    print(json.dumps({item: _hash(array) for item, array in arrays.items()}))
    return 0


def _hash(array: Any) -> str:
    header = f"{array.dtype} {list(array.shape)} ".encode()
    return hashlib.sha256(header + np.ascontiguousarray(array).tobytes()).hexdigest()


def compare(options: argparse.Namespace) -> int:
    """Print every difference between two records and the number of equal items; return 1 for unexplained ones."""
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
    """Compare files and arrays by hash; yield each name with "equal", or with the size of an array's difference."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) == new.get(name):
            yield name, "equal"
        elif name not in old or name not in new:
            yield name, "differs: only one record has it"
        elif name.startswith("file "):
            yield name, "differs: other bytes"
        else:
            one, two = (np.load(path)[name] for path in results)
            if "U" in (one.dtype.kind, two.dtype.kind):
                yield name, f"differs: {str(one)[:70]!r} became {str(two)[:70]!r}"
            elif (one.shape, one.dtype) != (two.shape, two.dtype):
                yield name, f"differs: {one.dtype} {list(one.shape)} became {two.dtype} {list(two.shape)}"
            else:
                first, second = one.astype(np.float64), two.astype(np.float64)
                other = (first != second) & ~(np.isnan(first) & np.isnan(second))
                with np.errstate(invalid="ignore"):
                    apart = np.abs(first - second)[other].max(initial=0)
                yield name, f"differs: {int(other.sum())} of {one.size} values, by at most {apart:.3g}"


def _document(old: Any, new: Any, name: str) -> str:
    """Compare two JSON documents; return "equal", the places that differ, or the reasons that explain them."""
    results = list(_differences(_in_one_format(old), _in_one_format(new), "", name == "report.json"))
    if not results:
        return "equal"
    beyond, reasons = [], set()
    for place in (place for place, apart in results if apart is None):
        names = [reason for pattern, reason in EXPLAINED.items() if re.match(pattern, place)]
        reasons.update(names)
        beyond += [] if names else [place]
    if beyond:
        return f"differs: {', '.join(beyond[:5])}{' …' if len(beyond) > 5 else ''}"
    worst = max((apart for _, apart in results if apart is not None), default=None)
    reasons |= set() if worst is None else {f"{FIGURES}, relative difference at most {worst:.1e}"}
    return f"explained: {'; '.join(sorted(reasons))}"


def _in_one_format(document: Any) -> Any:
    """Convert a manifest, or every manifest inside a document, to the newest format, as the runtime does."""
    from txl_runtime.bundle.manifest import decode_manifest

    if not isinstance(document, dict):
        return document
    if document.get("format") == "txl-deploy.bundle" and document["format_version"].startswith(("1.", "2.")):
        plain = json.loads(msgspec.json.encode(decode_manifest(msgspec.json.encode(document), "the manifest")))
        return {name: value for name, value in plain.items() if name not in UNSTABLE}
    return {name: _in_one_format(value) for name, value in document.items()}


def _differences(old: Any, new: Any, place: str, figures: bool) -> Iterator[tuple[str, float | None]]:
    """Yield each place at which two documents differ, and the relative difference; None if it may not differ there."""
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
    """Read the command line; record, run or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record", help="export and run every case")
    one.add_argument("out", type=Path, metavar="OUT", help="folder for bundles, snapshots, results and record.json")
    one.add_argument("--oracle", type=Path, help="folder of the oracle's cases; without it they are left out")
    one.add_argument("--demo", type=Path, help="the checkpoint of `make demo`; without it its cases are left out")
    one.add_argument("--own", action="store_true", help="models of one's own, too")
    one.add_argument("--source", type=Path, default=Path(__file__).parents[2], help="checkout whose packages are used")
    one.add_argument("--snapshots", type=Path, metavar="OLD", help="record whose snapshots fresh streams continue")
    one.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in (*CASES, *OWN_CASES)])
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
