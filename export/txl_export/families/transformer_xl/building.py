"""Builds a Transformer-XL's bundle (weight file, graphs, manifest), and the reference to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from txl_runtime.bundle.manifest import FORMAT, FORMAT_VERSION, Manifest
from txl_runtime.bundle.open_batch import with_sequences
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.bundle.tables import Counter, Input, Output, Precision, Program, StateTensor
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig, TransformerXL
from txl_runtime.errors import TxlError
from txl_runtime.listener import Listener
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.calibrating import gather_inputs
from txl_export.families.transformer_xl.folding import QUANTISABLE, fold, tied_rows, to_precision
from txl_export.families.transformer_xl.network import MemoryForm, Network, count_distances
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.ring import RingStep
from txl_export.families.transformer_xl.sensitivity import layer_sensitivity
from txl_export.families.transformer_xl.settings import Sizes
from txl_export.families.transformer_xl.softmax import Softmax
from txl_export.families.transformer_xl.step import Step, StepShape
from txl_export.families.transformer_xl.tables import expected_programs, expected_states
from txl_export.families.transformer_xl.weights import Weights, layer_name, model_id, parameter_count
from txl_export.graphs.checking import check_graph
from txl_export.graphs.quantised_matmul import apart, has_many_rows, whole_of
from txl_export.graphs.quantising import QUANTISED, gain_error, quantise
from txl_export.graphs.tracing import WeightFile, trace, write_graph
from txl_export.proof.threads import few_threads

FOLDED = (".attention.position.",)
"""Parts of the names of parameters that only serve to compute the graphs' tables of positions. They stay float32, and
no graph reads them."""
FLOAT64_PARAMETERS = 16_000_000
"""Maximum number of parameters of a reference that runs in float64, so that the reference's rounding is no part of the
bundle's error."""


def reference_for(config: ModelConfig, dialect: Dialect, memory_length: int, weights: Weights) -> PaperModel:
    """Return the reference: in float64 if the weights have at most `FLOAT64_PARAMETERS` values, else in float32."""
    small = parameter_count(weights) <= FLOAT64_PARAMETERS
    return PaperModel(config, dialect, memory_length, weights, torch.float64 if small else torch.float32)


@dataclass(frozen=True)
class Builder:
    """A model, and the choices for its bundle.

    Attributes:
        config, dialect, sizes, weights: the model.
        memory: the form of memory that the programs keep, "kv" or "hidden".
        precision: the bundle's precision.
        keep: beginnings of names of matrices that are not quantised, e.g. "layers.03".
        features: whether the rows that programs return end with the input of the last feed-forward layer.
    """

    config: ModelConfig
    dialect: Dialect
    sizes: Sizes
    weights: Weights
    memory: MemoryForm
    precision: Precision
    keep: Sequence[str]
    features: bool = False

    def reference(self, weights: Weights | None = None) -> PaperModel:
        """Return the model's reference; `weights`, if given, replace its weights."""
        chosen = self.weights if weights is None else weights
        return reference_for(self.config, self.dialect, self.sizes.memory_length, chosen)

    def write(self, folder: Path, listener: Listener, calibration: Ids | None = None) -> tuple[list[Program], Weights]:
        """Write the weight file and the graphs.

        For example, `calibration` is int32 [100000].

        Args:
            folder: the bundle's folder.
            calibration: the tokens [T] to which int4 matrices are fitted; None to round them.

        Returns:
            The programs, and the stored parts of quantised weights ({} without quantisation).
        """
        folded = to_precision(fold(self.config, self.weights), self.precision, keep=FOLDED)
        programs = expected_programs(
            self.config,
            self._states(),
            self.sizes.batch_size,
            self.sizes.segment_lengths,
            self._updates,
            self.features,
        )
        many = self.precision == "int8" and any(has_many_rows(program) for program in programs)
        if many:
            programs = apart(programs)
        # each file gets the graph of its longest segment, which comes first
        graphs = {program.file: program for program in reversed(programs)}
        whole = [file for file in graphs if whole_of(file) == file]
        networks = {file: self._network(graphs[file], folded) for file in whole}
        parts = self._parts(folded, many, calibration, listener)
        tensors = dict(parts)
        for network in networks.values():
            tensors |= network.position_tables()
        tensors |= self._initial_rows()
        path = folder / WEIGHTS
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise TxlError(f"{path.name} could not be written ({error}); make room or give another -o") from None
        stored = WeightFile(path, tied_rows(self.config, folded))
        for name in whole:
            listener.stage(f"trace and check {name.removesuffix('.onnx')}")
            opset = 24 if graphs[name].update == "ring" else 18
            traced = trace(networks.pop(name), opset)
            for file, program in graphs.items():
                if whole_of(file) == name:
                    write_graph(traced, program, stored, folder / file, parts)
                    promised = with_sequences(program, self.manifest(programs)) if program.open_batch else program
                    check_graph(folder / file, promised, opset)
        return list(programs), parts if self.precision in QUANTISED else {}

    def manifest(self, programs: Sequence[Program]) -> Manifest:
        """Return the manifest; files, vocabulary and provenance are added later."""
        model, rows = TransformerXL(config=self.config, dialect=self.dialect, memory=self.memory), self.sizes
        vocab_size, start = self.config.vocab_size, rows.memory_length if self.dialect.memory_start == "zeros" else 0
        counts: tuple[Literal["valid", "fill", "head"], ...] = ("valid", "fill", "head")
        counts = counts[: 1 + len(self._updates)]  # only ring programs read `head`
        return Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            model_id=model_id(self.config, self.dialect, rows.memory_length, self.weights),
            batch_size=rows.batch_size,
            batch_sizes=rows.batch_sizes,
            precision=self.precision,
            inputs=(
                Input(name="tokens", dtype="int32", shape=("B", "L"), role="tokens", vocab=vocab_size),
                *(Input(name=count, dtype="int32", shape=("B",), role=count) for count in counts),
            ),
            outputs=(
                Output(
                    name="logprobs",
                    dtype="float32",
                    shape=("B", "L", vocab_size),
                    role="logprobs",
                    clusters=self.config.clusters,
                    width=(1 + self.features) * self.config.d_model,
                ),
            ),
            states=self._states(),
            programs=tuple(programs),
            # zero rows count as memory: queries see them
            counters={"fill": Counter(start=start, most=rows.memory_length)},
            streams="independent",
            lengths="valid",
            reach=model.reach(rows.memory_length, rows.segment_lengths[0]),
            stepwise=model.stepwise(rows.memory_length, rows.segment_lengths[0]),
            family=msgspec.json.decode(msgspec.json.encode(model)),
            weights=WEIGHTS,
            files={},
            parameters=parameter_count(self.weights),
        )

    def quantisation(self, parts: Weights, text: Ids | None, listener: Listener) -> tuple[dict[str, float], float]:
        """Return two costs of quantising the weights.

        The first is the KL divergence in nats, by layer, of a model in which only that layer is quantised. The second
        is the error of the gain (`gain_error`). For example, ({"layers.00": 0.002}, 0.01).
        """
        ids = text if text is not None else np.arange(2048, dtype=np.int32) % self.config.vocab_size
        length = self.sizes.segment_lengths[0]
        layers = layer_sensitivity(self.reference, self.weights, parts, ids, length, listener)
        return layers, gain_error(fold(self.config, self.weights), parts)

    def _parts(self, folded: Weights, many: bool, calibration: Ids | None, listener: Listener) -> Weights:
        """Return the parameters as the weight file stores them: converted to the bundle's precision, or quantised."""
        exact, matrices = to_precision(folded, self.precision), [name for name in folded if name.endswith(QUANTISABLE)]
        if calibration is None:
            return quantise(exact, self.precision, matrices, self.keep, many)
        reference = self.reference()
        inputs = gather_inputs(reference, calibration, listener)
        listener.stage("fit int4 matrices to their inputs")
        with few_threads(reference.dtype == torch.float64):
            return quantise(exact, self.precision, matrices, self.keep, many, inputs)

    @property
    def _updates(self) -> tuple[str, ...]:
        """The update rules to write: "rolled", and "ring" if the memory is keys and values."""
        return ("ring", "rolled") if self.memory == "kv" and self.sizes.memory_length else ("rolled",)

    def _network(self, program: Program, folded: Weights) -> Network:
        kind, _, cluster = program.kind.partition(".")
        if kind in ("head", "tail"):
            return Softmax(self.config, self.dialect, folded, int(cluster or 0), self.features)
        sizes = self.sizes
        longest = StepShape(sizes.batch_size, sizes.segment_lengths[0], sizes.memory_length, self.memory)
        if program.update == "ring":
            # L is open; the longest L gives the ring's size
            return RingStep(self.config, self.dialect, longest, folded, self.features)
        shape = longest._replace(segment_length=program.segment_length)
        distances = count_distances(self.config, self.dialect, longest.slots)
        return Step(self.config, self.dialect, shape, folded, distances)

    def _states(self) -> tuple[StateTensor, ...]:
        rows, sizes = self._initial_rows(), self.sizes
        plain = expected_states(
            self.config,
            self.memory,
            sizes.batch_size,
            sizes.memory_length,
            self._updates,
            sizes.segment_lengths[0],
            self.precision,
        )
        named = ((state, f"initial.{state.name}") for state in plain)
        return tuple(msgspec.structs.replace(state, initial=name) if name in rows else state for state, name in named)

    def _initial_rows(self) -> Weights:
        """Return the key and value [H, d_head] of a memory row of zeros, for layers where they are not zero.

        Pre-norm and biases can make them nonzero. {} if memory starts empty or holds hidden rows.
        """
        if self.dialect.memory_start != "zeros" or self.memory != "kv" or not self.sizes.memory_length:
            return {}
        reference = PaperModel(self.config, self.dialect, 1, self.weights)
        rows: Weights = {}
        for i, (key, value) in enumerate(reference.keys_and_values(reference.initial_memory())):
            rows[f"initial.{layer_name(i)}.key"] = key[0, 0].clone()
            rows[f"initial.{layer_name(i)}.value"] = value[0, 0].clone()
        return {name: row for name, row in rows.items() if bool(row.any())}
