"""The systems of the surveys as docs/models.md lists them, and a small bundle of each beside its module in PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import txl_export
import txl_runtime
from model_forms import form_of
from oracle_stateful import GROWTH, Case, relative_error
from support import random_state, save_checkpoint, small_config
from txl_export.families.own_module.loading import importable, load_spec
from txl_export.families.own_module.module_call import in_float64
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.spec import InputSpec, StepSpec
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import Oracle
from txl_export.proof.references import Reference, ReferenceStreams, States, whole
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.types import Arrays, Ids

FOLDER = Path(__file__).parents[1] / "own_modules" / "systems"
FILES = {path.stem for path in FOLDER.glob("*.py")}
BATCH, SEGMENTS = 2, 300


@dataclass(frozen=True)
class System:
    """A row of the table.

    Attributes:
        carried: from step to step, in words.
        source: a file of `FOLDER`; else "checkpoint", a stored case, or "" where nothing is exported.
        kind: what the file is told to be.
        how: it is exported, in words; a file of `FOLDER` names itself.
        length: L.
    """

    carried: str
    source: str
    kind: str = ""
    how: str = ""
    length: int = 4

    @property
    def said(self) -> str:
        """The column that says how it is exported."""
        file = f"[`{self.source}.py`](../tests/own_modules/systems/{self.source}.py)"
        return self.how or (f"{file}, `{self.kind}`" if self.kind else file)


SYSTEMS: Mapping[str, System] = {
    "Transformer (segments without memory)": System(
        "nothing: each segment begins anew", "segments", "vanilla", length=8
    ),
    "Transformer-XL": System(
        "newest rows of each layer",
        "checkpoint",
        how="[its checkpoint](checkpoints.md)",
    ),
    "Compressive Transformer": System("newest rows, and older ones compressed", "compressed"),
    "kNN-LM": System(
        "what its language model carries; the datastore lies beside it",
        "kn01_knnlm",
        how="the language model, and a [datastore](datastore.md) beside it. Errors: a store in the graph",
        length=5,
    ),
    "SPALM": System(
        "what its Transformer-XL carries; the datastore lies beside it",
        "",
        how="the Transformer-XL and a [datastore](datastore.md), with a [gate](datastore.md#a-gate) that "
        "this project fits",
    ),
    "Memorizing Transformer": System(
        "newest keys and values, and a store that is searched",
        "mt01_knn",
        how="[`memorizing.py`](../tests/own_modules/memorizing.py), with up to some ten thousand rows in the graph",
    ),
    "Universal Transformer (ACT)": System("newest rows of each hop", "depth", "act"),
    "Adaptive span": System("newest rows of each layer, as many as its span", "positions", "span"),
    "Depth-adaptive Transformer": System(
        "newest rows of each layer; one that left keeps its row", "depth", "classifier"
    ),
    "CALM": System("newest rows of each layer; one that left keeps its row", "depth", "confidence"),
    "Shaw's relative positions": System("newest rows of each layer", "positions", "shaw"),
    "RoPE": System("newest rows of each layer, not yet turned", "positions", "rope"),
    "ALiBi": System("newest rows of each layer", "positions", "alibi"),
    "DA-Transformer": System("newest rows of each layer", "positions", "distance"),
    "Local attention": System("rows of the window", "patterns", "local"),
    "Strided (Sparse Transformer)": System("all rows, up to a most", "patterns", "strided"),
    "Block attention": System("rows of a block", "patterns", "block"),
    "Global and window (ETC, Longformer)": System("the first rows, and those of the window", "patterns", "global"),
    "Random (BigBird)": System("all rows, up to a most", "patterns", "random"),
    "LSH (Reformer)": System("all rows, up to a most; their buckets are found anew", "buckets", "lsh"),
    "Clustered (Routing Transformer)": System(
        "all rows, up to a most; their clusters are found anew", "buckets", "cluster"
    ),
    "Low rank (Linformer)": System(
        "nothing: keys are sums over the whole segment, what comes later included", "segments", "low_rank", length=8
    ),
    "Random features (Performer)": System(
        "a sum of features times values, and one of features", "features", "exp", length=1
    ),
    "Random features (RFA)": System("the same sums, which fade by a gate", "features", "waves", length=1),
    "GTrXL": System(
        "newest rows of each layer, zeros at first",
        "gd01_policy_step",
        how="adapters [`di-engine`](adapters.md#di-engine) and [`rllib`](adapters.md#rllib)",
        length=1,
    ),
    "Decision Transformer": System("returns, observations and actions of the window", "decision", length=1),
}
"""Every row in the table's order, by name."""


class Module(Reference):
    """A step's own module, in float64."""

    described = "the module"

    def __init__(self, spec: StepSpec, batch: int, length: int) -> None:
        eager = in_float64(spec, batch, length)
        assert eager is not None
        self.eager = eager
        self.logits = [entry.name for entry in spec.output_specs if entry.role == "logits"]

    def fresh(self, count: int) -> States:
        states = fresh_states(self.eager.spec, count, self.eager.dtype)
        return {name: None if tensor is None else tensor.numpy() for name, tensor in states.items()}

    def step(self, inputs: Arrays, states: States, valid: Ids | None) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in inputs.items()}
        held = {name: None if values is None else torch.from_numpy(values) for name, values in states.items()}
        outputs, after = self.eager(given, held)
        outputs |= {name: outputs[name].log_softmax(-1) for name in self.logits}
        return (*({name: tensor.numpy() for name, tensor in part.items()} for part in (outputs, after)),)


def exported(system: System, folder: Path) -> tuple[Path, Reference, StepSpec]:
    """A small bundle with random weights, its model as the reference, and a specification of what goes in."""
    options: dict[str, Any] = {"batch_size": BATCH, "segment_length": system.length, "verify": False}
    bundle, file = folder / "system.txl", folder / "weights.pt"
    if system.source == "checkpoint":
        model = transformer_xl()
        txl_export.export(save_checkpoint(file, small_config()), bundle, **options)
        tokens = InputSpec("tokens", ("B", "L"), tokens=model.config.vocab_size)
        return bundle, Oracle(model, "kv"), StepSpec(torch.nn.Identity(), [tokens], [], ["logprobs"])
    if system.source in FILES:
        spec = written(system, file)
    else:
        case = Case(system.source)
        spec = form_of(case).spec
        options |= {"batch_size": case.batch_size, "growth": GROWTH.get(system.source, "auto")}
    txl_export.export(spec, bundle, **options)
    return bundle, Module(spec, options["batch_size"], system.length), spec


def written(system: System, file: Path) -> StepSpec:
    """The step of a file of `FOLDER` with random weights, which are written first."""
    target, config = f"{FOLDER / system.source}.py:build", {"kind": system.kind} if system.kind else {}
    with importable(target):
        module = importlib.import_module(system.source)
    torch.manual_seed(0)
    model = (module.make if hasattr(module, "make") else module.Model)(**config)
    torch.save({"config": config, "model": model.state_dict()}, file)
    return load_spec(target, str(file))


def transformer_xl() -> PaperModel:
    """The model of `small_config`, in float64."""
    values = small_config()
    config = msgspec.convert(
        {name: values[name] for name in ModelConfig.__struct_fields__ if name in values}, ModelConfig
    )
    dialect = Dialect(family="txl", memory_start="empty", window=None, clamp_length=None)
    return PaperModel(config, dialect, values["memory_length"], random_state(values), torch.float64)


def errors(system: System, folder: Path) -> tuple[float, float]:
    """The largest errors of outputs and of states over 300 steps with resets, as `relative_error`."""
    bundle, reference, spec = exported(system, folder)
    model, draws, worst = txl_runtime.load(bundle, "cpu"), np.random.default_rng(5), [0.0, 0.0]
    stream, batch = model.stream(), model.batch_size
    beside = ReferenceStreams(model.manifest, reference, batch)
    axes = {entry.name: entry.axes for entry in model.manifest.outputs}
    for _ in range(SEGMENTS):
        if begin := [row for row in range(batch) if draws.random() < 0.03]:
            rows = begin if model.manifest.streams == "independent" else None
            stream.reset(rows)
            beside.reset(rows)
        given = {name: tensor.numpy() for name, tensor in random_inputs(spec, batch, system.length, draws).items()}
        outputs = stream.run(given)
        for rows, wanted in beside.run(given, np.full(batch, system.length)):
            for name, values in wanted.items():
                worst[0] = max(worst[0], relative_error(outputs[name][axes[name].at(rows)], whole(values, len(rows))))
        held = stream.state() if reference.resumes else stream.memory()
        for name, values in beside.shown():
            worst[1] = max(worst[1], relative_error(held[name], values))
    return worst[0], worst[1]
