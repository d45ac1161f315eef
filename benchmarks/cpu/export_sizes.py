"""Export models of published sizes with random weights, and print seconds per stage and peak memory.

    python benchmarks/cpu/export_sizes.py [--only wt103-base …] [--folder DIR] [--json FILE]

One process writes the checkpoint of a model, a second one exports it, and a third one runs the self-test, so that the
peak is that of the export only. The weights are N(0, 0.02), because speed and memory do not depend on their values. The
exit code is 1 if a peak is over 3 × weights + 1.5 GiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 2**30
WT103 = (20000, 40000, 200000)


def shape(layers: int, width: int, heads: int, head: int, inner: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Return the config of a checkpoint in this project's own format."""
    sizes = {"n_layer": layers, "d_model": width, "n_head": heads, "d_head": head, "d_inner": inner}
    rest = {"vocab_size": vocab, "d_embed": width, "embedding_scale": width**0.5, "same_length": True}
    return sizes | rest | more


MODELS: dict[str, tuple[dict[str, Any], int]] = {
    # config with the evaluation settings of the published results, and the segment length
    "enwik8-12": (shape(12, 512, 8, 64, 2048, 204, memory_length=2100, clamp_length=820), 80),
    "enwik8-24": (shape(24, 1024, 8, 128, 3072, 204, memory_length=3800, clamp_length=1000), 128),
    "wt103-base": (shape(16, 410, 10, 41, 2100, 267735, memory_length=640, clamp_length=400, cutoffs=WT103), 64),
    "wt103-large": (
        shape(18, 1024, 16, 64, 4096, 267735, memory_length=1600, clamp_length=1000, cutoffs=WT103, div_val=4),
        128,
    ),
    "over-2-GiB": (shape(36, 1280, 20, 64, 5120, 32000, memory_length=512, clamp_length=400), 64),
}


def write_checkpoint(name: str, path: str) -> None:
    """Write a checkpoint with random weights; it runs in a process of its own, whose memory is not counted."""
    import msgspec
    import torch
    from txl_export.checkpoints.txl import FORMAT, TxlConfig
    from txl_export.families.transformer_xl.weights import canonical_shapes
    from txl_runtime.bundle.transformer_xl import ModelConfig

    typed = msgspec.convert(MODELS[name][0], TxlConfig)
    config = ModelConfig(**{field: getattr(typed, field) for field in ModelConfig.__struct_fields__})
    must, _ = canonical_shapes(config)
    draws = torch.Generator().manual_seed(0)
    state = {key: torch.empty(size).normal_(0, 0.02, generator=draws) for key, size in must.items()}
    for key in state:
        if key.endswith("norm.weight"):
            state[key].fill_(1)
    torch.save({"format": FORMAT, "version": 1, "config": MODELS[name][0], "state": state}, path)


def run(*command: object) -> tuple[str, float, float]:
    """Run a command; return its stderr, its seconds, and its peak resident memory in GiB."""
    started = time.monotonic()
    code = (
        "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:]); "
        "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(r.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    peak = float(re.findall(r"PEAK (\d+)", done.stderr)[-1]) * 1024 / GIB
    return done.stderr, time.monotonic() - started, peak


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Write, export and self-test one model, delete its files, and return its sizes and times."""
    checkpoint, bundle = folder / f"{name}.pt", folder / f"{name}.txl"
    writer = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=(name, str(checkpoint)))
    writer.start()
    writer.join()
    weights = checkpoint.stat().st_size / GIB
    cli = (sys.executable, "-m", "txl_deploy")
    length = MODELS[name][1]
    lengths = ("--segment-length", length, "--segment-length", 1)
    log, seconds, peak = run(*cli, "export", checkpoint, "-o", bundle, *lengths)
    stages = {title: float(took) for title, took in re.findall(r"^(.+): ([\d.]+) s$", log, flags=re.MULTILINE)}
    _, selftest, _ = run(*cli, "selftest", bundle)
    size = sum(file.stat().st_size for file in bundle.iterdir()) / GIB
    for path in (checkpoint, *bundle.iterdir()):
        path.unlink()
    bundle.rmdir()
    return {
        "model": name,
        "weights_gib": weights,
        "bundle_gib": size,
        "peak_gib": peak,
        "limit_gib": 3 * weights + 1.5,
        "within": peak <= 3 * weights + 1.5,
        "seconds": seconds,
        "stages": stages,
        "selftest_seconds": selftest,
    }


def main() -> int:
    """Read the command line, measure every model, and print the results; return 1 if a peak is over its limit."""
    parser = argparse.ArgumentParser(description="Peak memory and time of exports at published sizes.")
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder without it")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in arguments.only:
            row = measure(name, Path(folder))
            rows.append(row)
            sizes = f"weights {row['weights_gib']:.2f} GiB, bundle {row['bundle_gib']:.2f}, peak {row['peak_gib']:.2f}"
            verdict = f"limit {row['limit_gib']:.2f}, {'within' if row['within'] else 'OVER'}"
            times = f"{row['seconds'] / 60:.1f} min, self-test {row['selftest_seconds']:.1f} s"
            print(f"{name}: {sizes} ({verdict}), {times}", flush=True)
            for stage, took in row["stages"].items():
                print(f"    {stage}: {took:.1f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print("own peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MiB")
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
