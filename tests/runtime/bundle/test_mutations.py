"""Manifests, vocabularies, sidecars and vectors with random damage: read or refused, in memory bounded by their size.

TXL_MUTATIONS=5000 tries so many of each; a sweep tries fewer.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frozen import frozen
from safetensors.numpy import save_file

OLD = frozen("0.8/tokens")
MANY = int(os.environ.get("TXL_MUTATIONS", "250"))
TIMES, MORE = 64, 80 << 20
"""Bytes of address space that reading may take: so many times the file's size, and so much more."""

READ = """
import json, random, resource, sys, time
from pathlib import Path
import numpy as np
from txl_runtime.bundle.contents import decode_report, decode_vectors
from txl_runtime.bundle.manifest import decode_manifest
from txl_runtime.bundle.vocabulary import decode_vocabulary
from txl_runtime.device.engines.sidecar import decode_sidecar
from txl_runtime.errors import BundleError

kind, seed, many, times, more = sys.argv[1], *map(int, sys.argv[2:6])
sources = [Path(path).read_bytes() for path in sys.argv[6:]]
read = {
    "manifest": lambda data: decode_manifest(data, "manifest.json").state_bytes,
    "vocabulary": lambda data: decode_vocabulary(data, 60, "vocabulary.json").decode([0, 1, 59]),
    "vectors": lambda data: decode_vectors(data, "selftest.npz"),
    "tensors": lambda data: decode_vectors(data, "selftest.safetensors"),
    "sidecar": lambda data: decode_sidecar(data, "a.json"),
    "report": lambda data: decode_report(data, "report.json"),
}[kind]
draw = random.Random(seed)
SPECIAL = ["", "\\x00", "é", "../x", "con", "a" * 3000, -1, 0, 1, 2**31, 2**63, -(2**70), 1e308, 0.5, True, None]
SPECIAL += [[], {}]


def spoiled(node):
    places = []
    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])
    walk(node)
    for _ in range(draw.choice([1, 1, 2, 5])):
        where, key = draw.choice(places)
        if isinstance(where, dict) and key not in where or isinstance(where, list) and key >= len(where):
            continue
        what = draw.randrange(6)
        if what == 0:
            del where[key]
        elif what == 1:
            where[key] = draw.choice(SPECIAL)
        elif what == 2:
            other, place = draw.choice(places)
            there = place in other if isinstance(other, dict) else place < len(other)
            where[key] = json.loads(json.dumps(other[place])) if there else 7
        elif what == 3 and isinstance(where, list):
            where.extend([where[key]] * draw.choice([1, 40]))
        elif what == 4 and isinstance(where[key], int):
            where[key] += draw.choice([-1, 1, 2**20])
        elif what == 5 and isinstance(where[key], str):
            where[key] = where[key][: draw.randrange(len(where[key]) + 1)] + draw.choice("x/\\x7f")
    return node


def mutated():
    data = draw.choice(sources)
    if kind not in ("vectors", "tensors") and draw.random() < 0.8:
        return json.dumps(spoiled(json.loads(data)), ensure_ascii=draw.random() < 0.5).encode()
    data = bytearray(data)
    for _ in range(draw.choice([1, 2, 8])):
        start = draw.randrange(len(data))
        pieces = [b"", bytes([draw.randrange(256)]), bytes(data[start : start + 9]) * 3, b"[" * 2000]
        piece = draw.choice([*pieces, b"\\xff\\xff\\xff\\xff"])
        data[start : start + draw.choice([0, 1, len(piece)])] = piece
    return bytes(data)


for source in sources:
    read(source)
counts = {"read": 0, "refused": 0}
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
worst = 0
for _ in range(many):
    data = mutated()
    resource.setrlimit(resource.RLIMIT_AS, (held + times * len(data) + more, resource.RLIM_INFINITY))
    began = time.process_time()
    try:
        read(data)
        counts["read"] += 1
    except BundleError as error:
        counts["refused"] += 1
        assert len(str(error)) < 1000 and str(error).isprintable(), str(error)
    worst = max(worst, time.process_time() - began)
print(json.dumps({**counts, "seconds": worst}))
"""


def vocabularies(folder: Path) -> list[Path]:
    made = {
        "bytes": {"kind": "words", "symbols": ["a", "b", "é"], "unknown": 0},
        "words": {"kind": "words", "symbols": [f"w{i}" for i in range(60)], "line_start": 1, "line_end": 2},
        "folded": {"kind": "words", "symbols": ["<s>", "a"], "unknown": 1, "lower_case": True, "delimiter": ""},
    }
    for name, vocabulary in made.items():
        (folder / name).write_text(json.dumps(vocabulary))
    return [folder / name for name in made]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are Linux's")
@pytest.mark.parametrize("kind", ["manifest", "vocabulary", "vectors", "tensors", "sidecar", "report"])
def test_random_damage_is_refused_or_does_not_matter(kind, tmp_path):
    sources = {
        "manifest": [frozen(name) / "manifest.json" for name in ("ring", "clusters", "hidden", "policy-16")],
        "vectors": [frozen(name) / "selftest.npz" for name in ("0.8/tokens", "0.8/clusters")],
        "sidecar": sorted(OLD.glob("engines/*/*.json")),
        "report": [OLD / "report.json"],
    }
    if kind == "tensors":
        sources[kind] = [tmp_path / f"{number}" for number in range(len(sources["vectors"]))]
        for made, old in zip(sources[kind], sources["vectors"], strict=True):
            save_file(dict(np.load(old)), made)
    given = sources[kind] if kind in sources else vocabularies(tmp_path)
    assert given
    seed = str(random.randrange(2**31)) if MANY > 1000 else "1"
    command = [sys.executable, "-W", "error", "-c", READ, kind, seed, str(MANY), str(TIMES), str(MORE)]
    done = subprocess.run([*command, *map(str, given)], capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    print(kind, found)
    assert found["read"] + found["refused"] == MANY
    assert found["refused"] > 0
    assert found["seconds"] < 5
