"""Compare TensorRT-RTX engines that hold their own weights with engines that share weights or have several profiles.

Each program of a model is built twice: with weights in each engine, as `build --weights each` does, and with weights
that the engines are given, as `--weights once` does. The layers of a model with ring memory are one graph of open
segment length; it is built once for each length, and once with an optimization profile for each length. No GPU is
needed: the builder reports sizes, activation memory and kernels. The last table computes from the shapes what published
models in fp16 would take on a device of 8 GB.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx
from rtx_layouts import Graph, as_one
from txl_engines.adapting import adapt
from txl_engines.attention_operator import unite_attention
from txl_engines.checking import read_graph
from txl_engines.compiler import Compiler
from txl_engines.composing import compose, whole_programs
from txl_engines.given_weights import give_weights
from txl_engines.layers import LayerReport, read_layers
from txl_engines.shapes import fix_sizes
from txl_export.checkpoints.txl import TxlConfig
from txl_export.families.transformer_xl.weights import canonical_shapes
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.transformer_xl import ModelConfig
from txl_runtime.device.engines.library import load_library

from benchmarks.shared.models import TINY, WT103, random_bundle, shape
from benchmarks.shared.results import finish, parser
from benchmarks.shared.tables import Table, log

DEEP = shape(12, 512, 8, 64, 2048, 204), 640
CLUSTERS = shape(4, 192, 6, 32, 768, 20000, clamp_length=100, cutoffs=[2000, 8000]), 64
PUBLISHED = {
    "wt103-base": (shape(16, 410, 10, 41, 2100, 267735, clamp_length=400, cutoffs=WT103), 640, 64),
    "enwik8-24": (shape(24, 1024, 8, 128, 3072, 204, clamp_length=1000), 3800, 128),
}
MB = 1e6


class Built(NamedTuple):
    """An engine: its size, its weights and its activations on the device in bytes, and the layers of all profiles."""

    size: int
    weights: int
    activations: int
    layers: LayerReport


def build(model: Any, folder: Path, lengths: Sequence[int], batch: int) -> Built:
    """Build an engine for SM 86.

    Args:
        model: the ONNX graph.
        folder: the folder with the graph's weights.
        lengths: the segment lengths, each with an optimization profile; () for a graph of a fixed length.
        batch: B.
    """
    library = load_library("rtx")
    trt, keep = library.module, library.journal.add
    said: list[str] = []

    def hear(severity: int, text: str) -> None:
        said.append(text)
        keep(severity, text)

    library.journal.add = hear  # type: ignore[method-assign]
    parsed = Compiler(library).parse(model.SerializeToString(), str(folder / "tried.onnx"))
    config = parsed.builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    for length in lengths:
        profile = parsed.builder.create_optimization_profile()
        profile.set_shape("tokens", *[(batch, length)] * 3)
        config.add_optimization_profile(profile)
    plan = parsed.builder.build_serialized_network(parsed.network, config)
    values = [value.name for value in (*model.graph.input, *model.graph.output) if "memory." in value.name]
    names = [f"{name}{end}" for name in values for end in ("", " [profile 1]")]
    text = "\n".join(said)
    library.journal.add = keep  # type: ignore[method-assign]
    weights, activations = (
        max(int(size) for size in re.findall(f"Total {what} Memory: (\\d+)", text))
        for what in ("Weights", "Activation")
    )
    return Built(memoryview(plan).nbytes, weights, activations, read_layers(library.journal.layers, names))


def measured(values: dict[str, Any], rows: int, batch: int, precision: str) -> Table:
    """Build a model's layers as two engines and as one engine of two profiles; return a table of their figures."""
    columns = (
        "engines",
        "kernels per layer",
        "fused",
        "kernels that copy",
        "MB on disk",
        "weights MB",
        "activations MB",
    )
    table = Table(
        columns, title=f"Layers for L 64 and L 1: {values['n_layer']} of them, M {rows}, B {batch}, {precision}"
    )
    count = values["n_layer"]

    def add(title: str, *built: Built) -> None:
        kernels = sum(each.layers.kernels or 0 for each in built) / 2 / count
        table.add(
            title,
            kernels,
            f"{sum(each.layers.fused_attention for each in built)} of {2 * count}",
            sum(each.layers.copying for each in built),
            sum(each.size for each in built) / MB,
            sum(each.weights for each in built) / MB,
            max(each.activations for each in built) / MB,
        )

    with tempfile.TemporaryDirectory() as name:
        path = random_bundle(Path(name) / "m.txl", values, (64, 1), rows, batch_size=batch, precision=precision)
        open_sizes = onnx.load(path / "hidden-ring.onnx", load_external_data=False)
        open_length = fix_sizes(open_sizes, {"batch": batch})
        fixed = {length: fix_sizes(open_length, {"segment": length}) for length in (64, 1)}
        log("building")
        products = {length: build(fixed[length], path, (), batch) for length in (64, 1)}
        add("two, products", *products.values())
        add("two, L 1 with one operator (what `build` makes)", products[64], build(_united(fixed[1]), path, (), batch))
        add("one of two profiles, products", build(open_length, path, (64, 1), batch))
        add("one of two profiles, one operator", build(_united(open_length), path, (64, 1), batch))
    return table


def _united(model: Any) -> Any:
    graph = Graph(model.SerializeToString())
    as_one(graph)
    return graph.model


def given(title: str, values: dict[str, Any], rows: int, lengths: tuple[int, int]) -> Table:
    """Build programs with own and with given weights; return a table of both.

    The table has all programs of ring memory, and the log-probabilities' program of rolled memory.
    """
    columns = ("program", "kernels", "kernels that copy", "engine, MB", "weights in it, MB", "activations, MB")
    table = Table(columns, title=f"{title}, fp16, B 1: own → given")
    with tempfile.TemporaryDirectory() as name:
        path = random_bundle(Path(name) / "m.txl", values, lengths, rows, precision="fp16")
        bundle, facts = open_bundle(path), load_library("rtx").facts
        rolled = (each for each in whole_programs(bundle.manifest, "rolled") if each.kind == "logprobs")
        for program in (*whole_programs(bundle.manifest, "ring"), *rolled):
            log(f"building {program.name}")
            own = read_graph(compose(bundle, program), program, path, facts.opset)
            results = []
            for graph in (own, give_weights(own, bundle.manifest.weights)):
                united = unite_attention(adapt(graph), program)
                results.append(build(onnx.load_from_string(united.data), path, (), 1))
            shown = [
                (
                    str(one.layers.kernels),
                    str(one.layers.copying),
                    *(f"{size / MB:.2f}" for size in (one.size, one.weights, one.activations)),
                )
                for one in results
            ]
            title = program.name if program.update == "ring" else f"{program.name} ({program.update})"
            table.add(title, *map(" → ".join, zip(*shown, strict=True)))
    return table


class Room(NamedTuple):
    """The bytes that a model takes on a device in fp16.

    Attributes:
        weights: all weights, as an engine holds them that shares none.
        once, each: if engines share weights, the shared bytes, and the bytes in each engine.
        memory: the ring's buffers.
        working: the working memory of the largest program.
    """

    weights: int
    once: int
    each: int
    memory: int
    working: int


def room(values: dict[str, Any], memory: int, length: int) -> Room:
    """Compute the bytes that a model takes on a device with one sequence.

    Args:
        values: the model's config.
        memory: M.
        length: the longest segment.
    """
    typed = msgspec.convert(values, TxlConfig)
    config = ModelConfig(**{name: getattr(typed, name) for name in ModelConfig.__struct_fields__})
    shapes, _ = canonical_shapes(config)
    positions = [name for name in shapes if ".attention.position.weight" in name]
    distances = min(memory + 2 * length, values["clamp_length"] + 1)
    width = values["n_head"] * values["d_head"]
    count = sum(math.prod(size) for name, size in shapes.items() if name not in positions)
    tables = len(positions) * distances * width  # tables of positions replace the weights of `positions`
    count += tables
    edges = [0, *values.get("cutoffs", ()), values["vocab_size"]]
    tails = [end - start for start, end in pairwise(edges)][1:]  # each tail is stored in the whole table and as a copy
    kept = values["d_embed"] * sum(tail for tail in tails if tail % 2)  # weights of odd sizes stay in each engine
    once = count + values["d_embed"] * sum(tails) - kept
    if values["d_head"] % 2 or distances % 2:
        kept, once = kept + tables, once - tables
    ring = 2 * values["n_layer"] * width * (memory + 2 * length)
    scores = values["n_head"] * length * (memory + 2 * length)
    return Room(2 * count, 2 * once, 2 * kept, 2 * ring, 3 * 2 * scores + 6 * length * values["vocab_size"])


def on_paper() -> Table:
    """Return a table of the memory that published models take on a device of 8 GB, with one sequence."""
    columns = ("model", "engines", "MB on disk", "weights on the device", "memory", "working room", "in all, MB")
    table = Table(columns, title="On a Jetson Orin of 8 GB, fp16, B 1: arithmetic, not a measurement")
    for title, (values, memory, length) in PUBLISHED.items():
        need = room(values, memory, length)
        large = values["vocab_size"] > 1024
        every = 5 if large else 4
        for count, what, sharing in (
            (every, "one a program", False),
            (2, "--programs logprobs", False),
            (every, "one a program, which share", True),
            (2, "--programs logprobs, which share", True),
        ):
            engines = f"{count}: {what}"
            weights = need.once + count * need.each if sharing else count * need.weights
            disk = count * need.each if sharing else weights
            total = weights + need.memory + need.working
            table.add(title, engines, disk / MB, weights / MB, need.memory / MB, need.working / MB, total / MB)
    return table


def main() -> None:
    """Read the command line, build all engines, and print the tables."""
    arguments = parser(__doc__, seconds=None).parse_args()
    values, rows = (TINY, 16) if arguments.quick else DEEP
    batches = (2,) if arguments.quick else (1, 4)
    lengths = (16, 1) if arguments.quick else (64, 1)
    deep = f"{values['n_layer']} layers, M {rows}, {values['vocab_size']} words"
    tables = [given(deep, values, rows, lengths)]
    if not arguments.quick:
        tables.append(given("4 layers, M 64, 20,000 words in three clusters", *CLUSTERS, (16, 1)))
    tables += [measured(values, rows, batch, "fp16") for batch in batches]
    tables.append(on_paper())
    finish("rtx_weights", arguments, tables, [dataclasses.asdict(table) for table in tables])


if __name__ == "__main__":
    main()
