"""Load a bundle in several processes while a writer replaces it, and check that every model is wholly of one bundle.

    python benchmarks/soak/loads_under_replacement.py [--loads 20000] [--readers 3] [--folder /dev/shm] …

Two bundles of the same sizes, which differ in every file that a load reads, take turns under one name. A writer
replaces one by the other at random moments, in one of five ways (`WAYS`). Readers load the bundle and feed the model
some tokens. The result of a reader has to be that of one of the two bundles, bit for bit, or the load has to raise a
`BundleError`.

If the writer rewrites files in place, wrong results are counted, but are no failure: engines map the weight file, and
two changes within a tick of the clock leave the same times. A result is only compared if the weight file that the load
opened has not been replaced or rewritten when the tokens have been fed.

The script prints one line for each way and folder, and with --json one JSON document. Exit code 1 says that a result
was of neither bundle although the writer renames files or folders.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import txl_runtime
from safetensors.numpy import load_file, save_file
from txl_runtime.bundle.encoding import file_sha256

SOURCE = Path(__file__).parents[2] / "tests" / "fixtures" / "release_0_8" / "clusters"
PAUSES = (0, 0.02, 0.3, 1.5)
"""Largest numbers of seconds before a replacement; one is drawn each time. A load takes some hundredths of a second."""


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Make the bundles `old` and `new` of the same sizes in a folder; they differ in every file that a load reads."""
    old, new = folder / "old", folder / "new"
    for place in (old, new):
        shutil.copytree(SOURCE, place)
    weights = load_file(new / "weights.safetensors")
    metadata = {"format": "pt"} if b'"__metadata__"' in (new / "weights.safetensors").read_bytes()[:4096] else None
    save_file({name: -tensor for name, tensor in weights.items()}, new / "weights.safetensors", metadata=metadata)
    for path in new.glob("*.onnx"):
        # the producer's name in the graph's file
        path.write_bytes(path.read_bytes().replace(b"txl-deploy", b"TXL-DEPLOY", 1))
    (new / "report.json").write_text("{}")
    for place in (old, new):
        manifest = json.loads((place / "manifest.json").read_bytes())
        manifest["files"] = {
            name: {"size": (place / name).stat().st_size, "sha256": file_sha256(place / name)}
            for name in manifest["files"]
            if (place / name).is_file()
        }
        (place / "manifest.json").write_text(json.dumps(manifest))
    return old, new


def exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders by one system call."""
    if ctypes.CDLL(None, use_errno=True).renameat2(-100, os.fsencode(first), -100, os.fsencode(second), 2):
        raise OSError(ctypes.get_errno(), "renameat2")


def by_exchange(path: Path, source: Path) -> None:
    """Copy `source`, exchange the copy with the bundle at `path`, and remove the old bundle."""
    beside = path.with_name(f"{path.name}.beside")
    shutil.copytree(source, beside)
    exchange(path, beside)
    shutil.rmtree(beside)


def by_publishing(path: Path, source: Path) -> None:
    """Replace the bundle at `path` by a copy of `source`, as `txl-deploy export --force` does."""
    from txl_export.bundle.placing import publishing

    with publishing(path, force=True) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def by_link(path: Path, source: Path) -> None:
    """Let the link at `path` point to `source`."""
    beside = path.with_name(f"{path.name}.beside")
    beside.symlink_to(source)
    beside.replace(path)


def by_files(path: Path, source: Path) -> None:
    """Rename copies of the files of `source` over the bundle's files, one by one in random order."""
    for file in random.sample(sorted(source.iterdir()), len(list(source.iterdir()))):
        beside = path.with_name(f"{path.name}.beside")
        shutil.copyfile(file, beside)
        beside.replace(path / file.name)


def in_place(path: Path, source: Path) -> None:
    """Write the content of the files of `source` into the bundle's files, in random order, each in two halves."""
    for file in random.sample(sorted(source.iterdir()), len(list(source.iterdir()))):
        data = file.read_bytes()
        with (path / file.name).open("r+b") as stream:
            stream.write(data[: len(data) // 2])
            stream.flush()
            stream.write(data[len(data) // 2 :])
            stream.truncate()


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "exchange": by_exchange,
    "publishing": by_publishing,
    "link": by_link,
    "files": by_files,
    "in-place": in_place,
}
LASTING = ("link",)
"""Ways that leave both bundles where they are."""


def write(way: str, folder: Path) -> None:
    """Replace the bundle again and again until the file `stop` appears in the folder.

    Args:
        way: a key of `WAYS`.
        folder: the folder with both bundles.
    """
    path, turns = folder / "model.txl", itertools.cycle([folder / "new", folder / "old"])
    WAYS[way](path, next(turns))  # before the readers start, because the first replacement also imports modules
    (folder / "started").touch()
    while not (folder / "stop").exists():
        # some pauses are shorter than a load, because two exchanges within one load are the hardest to notice
        time.sleep(random.uniform(0, random.choice(PAUSES)))
        WAYS[way](path, next(turns))
        with (folder / "replaced").open("a") as count:
            count.write(".")


def read(way: str, folder: Path, loads: int, out: Path) -> None:
    """Load the bundle repeatedly, and write the number of loads by result to `out`.

    Args:
        way: a key of `WAYS`.
        folder: the folder with both bundles.
        loads: the number of loads that count.
        out: the JSON file: {"old": 5000, "new": 1600, …}.
    """
    path = folder / "model.txl"
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9) % 10
    truths = {
        (lean, fed(txl_runtime.load(folder / name, "cpu", 1, update="ring", lean=lean), tokens)): name
        for name, lean in itertools.product(("old", "new"), (False, True))
    }
    assert len(truths) == 4
    seen: Counter[str] = Counter()
    while sum(seen.values()) - seen["rewritten"] < loads:
        lean = random.random() < 0.3
        try:
            model = txl_runtime.load(path, "cpu", 1, update="ring", lean=lean)
            result = fed(model, tokens)
            rewritten = way == "in-place" and not model.bundle.folder.holds(model.manifest.weights)
        except txl_runtime.BundleError as error:
            seen["refused: " + ("replaced meanwhile" if "was replaced" in str(error) else "a file or folder")] += 1
            continue
        seen["rewritten" if rewritten else truths.get((lean, result), "wrong")] += 1
    out.write_text(json.dumps(seen))


def fed(model: txl_runtime.Model, tokens: np.ndarray) -> bytes:
    """Feed tokens [B, 9] to a new stream of a model, and return the bytes of the result."""
    return model.stream().feed(tokens[: model.batch_size]).tobytes()


def run(way: str, parent: Path, loads: int, readers: int) -> dict[str, int | float]:
    """Run one writer and several readers in a folder; return the loads by result, the replacements and the seconds.

    Args:
        way: a key of `WAYS`.
        parent: a folder on the file system to try.
        loads: the number of loads of all readers together.
        readers: the number of readers.
    """
    with tempfile.TemporaryDirectory(dir=parent, prefix="replaced-") as made:
        folder = Path(made)
        make_pair(folder)
        if way == "link":
            (folder / "model.txl").symlink_to(folder / "old")
        else:
            shutil.copytree(folder / "old", folder / "model.txl")
        command = [sys.executable, __file__, "--way", way, "--inside", str(folder)]
        began = time.monotonic()
        writer = subprocess.Popen([*command, "--write"])
        while not (folder / "started").exists():
            time.sleep(0.1)
        shares = [loads // readers + (number < loads % readers) for number in range(readers)]
        running = [
            subprocess.Popen([*command, "--loads", str(share), "--out", str(folder / f"seen{number}")])
            for number, share in enumerate(shares)
        ]
        codes = [reader.wait() for reader in running]
        (folder / "stop").touch()
        codes.append(writer.wait())
        if any(codes):
            raise SystemExit(f"a process ended with {codes}")
        seen: Counter[str] = Counter()
        for number in range(readers):
            seen.update(json.loads((folder / f"seen{number}").read_text()))
        replaced = (folder / "replaced").stat().st_size
        return {**seen, "replacements": replaced, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Read the command line, and try every way in every folder; or run as the writer or a reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=20_000, help="of all ways and folders together (default 20000)")
    parser.add_argument("--readers", type=int, default=3, help="processes that load at the same time (default 3)")
    parser.add_argument("--way", choices=WAYS, action="append", help="of replacing, may be repeated (default all)")
    parser.add_argument(
        "--folder",
        type=Path,
        action="append",
        help="to work in, may be repeated (default /dev/shm and the temporary folder)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON document on standard output, lines on standard error"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        (way,) = options.way
        if options.write:
            write(way, options.inside)
        else:
            read(way, options.inside, options.loads, options.out)
        return 0
    folders = options.folder or [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - in memory, and on a disk
    cases = [(way, folder) for way in options.way or WAYS for folder in folders]
    results = []
    for way, folder in cases:
        seen = run(way, folder, -(-options.loads // len(cases)), options.readers)
        results.append({"way": way, "folder": str(folder), **seen})
        print(json.dumps(results[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(results))
    return 1 if any(entry.get("wrong") for entry in results if entry["way"] != "in-place") else 0


if __name__ == "__main__":
    sys.exit(main())
