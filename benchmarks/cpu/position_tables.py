"""Steps whose product with the table of positions is written in several forms, in turns.

    python benchmarks/cpu/position_tables.py [--only NAME …] [--rounds 40] [--threads 1]

Bundles hold a table [H, d_head, rows] for each layer, and multiply queries [B, H, L, d_head] with it. The other forms
are made of the bundle's graph when it is opened:

    turned      [H, rows, d_head], ONNX Runtime's FusedMatMul with transB, as keys are read
    first       table times turned queries, MatMul: [H, rows, d_head] · [B, H, d_head, L]
    together    all sequences and positions in one product for each head, with the table as it is
    together, turned    the same with FusedMatMul

"again" is the bundle a second time, which shows the noise. The times are of the processor, the ratios medians of the
rounds' own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import txl_runtime
from onnx import helper, numpy_helper
from safetensors.numpy import load_file
from txl_runtime.host.idle_masks import without_idle_masks
from txl_runtime.model import Model
from txl_runtime.types import Floats

from benchmarks.shared.models import TINY, random_bundle, random_tokens, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

SMALL, LARGE = shape(4, 192, 6, 32, 768, 256), shape(12, 512, 8, 64, 2048, 204)
MODELS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "small": (SMALL, 128, 1, "fp32"),
    "small-b16": (SMALL, 128, 16, "fp32"),
    **{f"m{m}-{p}": (LARGE, m, 1, p) for m in (160, 640, 2100) for p in ("fp32", "int8", "int4")},
    "m640-b16": (LARGE, 640, 16, "fp32"),
}
"""By name: shape, M, B and precision."""
FORMS = ("as it is", "again", "turned", "first", "together", "together, turned")
LENGTHS = (1, 64)
MOST_APART = {"fp32": 1e-4}
"""Largest difference of a log-probability between two forms; quantised layers round to another integer: 0.1."""


def rewritten(graph: bytes, tables: dict[str, Floats], form: str) -> bytes:
    """Return a graph with every product with a table in another form, and the tables in it."""
    model = onnx.load_model_from_string(graph)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    left = {name for name in stored if ".position.table." in name}
    for node in model.graph.node:
        name = node.input[1] if node.op_type == "MatMul" else ""
        if ".position.table." not in name:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
            continue
        left.remove(name)
        table, query, out = tables[name], node.input[0], node.output[0]
        heads, width, _ = table.shape
        turned = form == "first" or form.endswith("turned")
        array = np.ascontiguousarray(table.transpose(0, 2, 1)) if turned else table
        stored[name].CopyFrom(numpy_helper.from_array(array, name))
        fused: dict[str, Any] = {"domain": "com.microsoft", "transB": 1}

        def add(op: str, read: list[str], to: str, out: str = out, **said: Any) -> str:
            nodes.append(helper.make_node(op, read, [out + to], **said))
            return out + to

        def numbers(to: str, values: list[int], out: str = out) -> str:
            model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), out + to))
            return out + to

        if form == "turned":
            add("FusedMatMul", [query, name], "", **fused)
        elif form == "first":  # a Reshape of no effect: else ONNX Runtime gives the transpose to the product again
            column = add("Transpose", [query], ".column", perm=[0, 1, 3, 2])
            column = add("Reshape", [column, numbers(".sizes", [0, heads, width, -1])], ".kept")
            add("Transpose", [add("MatMul", [name, column], ".product")], "", perm=[0, 1, 3, 2])
        else:
            rows = add("Transpose", [query], ".heads", perm=[1, 0, 2, 3])
            rows = add("Reshape", [rows, numbers(".sizes", [heads, -1, width])], ".rows")
            op, said = ("FusedMatMul", fused) if turned else ("MatMul", {})
            product = add(op, [rows, name], ".product", **said)
            sizes = add("Gather", [add("Shape", [query], ".shape"), numbers(".places", [1, 0, 2])], ".sequences")
            sizes = add("Concat", [sizes, numbers(".rest", [-1])], ".split", axis=0)
            add("Transpose", [add("Reshape", [product, sizes], ".back")], "", perm=[1, 0, 2, 3])
    if left:
        raise SystemExit(
            f"{sorted(left)[0]} is not the second factor of a MatMul, expected all tables to be; change this script"
        )
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    if all(opset.domain != "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    data: bytes = model.SerializeToString()
    return data


def opened(path: Path, form: str, threads: int) -> Model:
    """Return the bundle's model, its tables read in this form."""
    if form in FORMS[:2]:
        return txl_runtime.load(path, threads=threads)
    tables = load_file(path / "weights.safetensors")

    def changed(graph: bytes, *rest: Any) -> tuple[bytes, Any]:
        graph, kept = without_idle_masks(graph, *rest)
        return rewritten(graph, tables, form), kept

    with patch("txl_runtime.host.onnxruntime_cpu.without_idle_masks", changed):
        return txl_runtime.load(path, threads=threads)


def measure(models: dict[str, Model], sequences: int, length: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return the milliseconds of each round by form, and the largest difference of a log-probability."""
    first = models[FORMS[0]]
    streams = {form: model.stream(batch_size=sequences) for form, model in models.items()}
    segment = random_tokens(first.manifest.config.vocab_size, (sequences, max(LENGTHS)))
    for _ in range(first.memory_length // segment.shape[1] + 1):
        streams[FORMS[0]].step(segment)
    full = streams[FORMS[0]].snapshot()
    for stream in streams.values():
        stream.restore(full)
    tokens = segment[:, :length]
    found: dict[str, list[float]] = {form: [] for form in models}
    apart = 0.0
    for turn in range(rounds):
        given: dict[str, Floats] = {}
        for form in list(models)[:: 1 if turn % 2 else -1]:
            streams[form].step(tokens)  # the caches are this form's again
            began = time.process_time()
            given[form] = streams[form].step(tokens)
            found[form].append((time.process_time() - began) * 1e3)
        apart = max(apart, *(float(np.abs(of - given[FORMS[0]]).max()) for of in given.values()))
    return found, apart


def main() -> None:
    """Export, measure and print the table."""
    made = parser(__doc__, seconds=None)
    made.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    made.add_argument("--rounds", type=int, default=40)
    options = made.parse_args()
    table, every = Table(("model", "sequences", "L", "as it is, ms", *FORMS[1:], "apart")), {}
    for name in options.only:
        values, memory, batch, precision = (TINY, 16, 2, "fp32") if options.quick else MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            path = random_bundle(Path(folder, "bundle"), values, LENGTHS, memory, batch_size=batch, precision=precision)
            forms = FORMS if batch > 1 else FORMS[:4]
            models = {form: opened(path, form, options.threads) for form in forms}
            for sequences in sorted({1, batch}):
                for length in LENGTHS:
                    log(f"{name}, {sequences} of {batch} sequences, L {length}")
                    times, apart = measure(models, sequences, length, 2 if options.quick else options.rounds)
                    if not apart <= MOST_APART.get(precision, 0.1):
                        raise SystemExit(f"{name}: forms are {apart:.0e} apart, expected rounding; change this script")
                    every[f"{name}, {sequences}, {length}"] = times
                    base = times[FORMS[0]]
                    shown = [
                        f"{statistics.median(np.divide(times[f], base)):.2f}" if f in times else None for f in FORMS[1:]
                    ]
                    table.add(name, sequences, length, statistics.median(base), *shown, f"{apart:.0e}")
    finish("position_tables", options, [table], every)


if __name__ == "__main__":
    main()
