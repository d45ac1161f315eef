"""The export: checkpoint → canonical model → graphs → bundle, verified before it gets its name."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import txl_runtime
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from txl_runtime.bundle.format1 import Dialect, ModelConfig, expected_programs, expected_states
from txl_runtime.bundle.manifest import FORMAT, FORMAT_VERSION, Manifest
from txl_runtime.bundle.reading import REPORT, SELFTEST, WEIGHTS
from txl_runtime.bundle.tables import Precision, Program, StateTensor
from txl_runtime.bundle.vocabulary import decode_vocabulary
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.selftest import SelftestResult, run_selftest

from txl_export.bundle.placing import check_destination, publishing
from txl_export.bundle.sealing import seal
from txl_export.checkpoints import Source, read_checkpoint, read_config
from txl_export.checkpoints.overrides import ask_overrides
from txl_export.checkpoints.vocabularies import read_vocabulary_file
from txl_export.families.transformer_xl.folding import HALF, fold, tied_rows, to_precision
from txl_export.families.transformer_xl.network import MemoryForm, Network, count_distances
from txl_export.families.transformer_xl.reference import Reference
from txl_export.families.transformer_xl.ring import RingStep
from txl_export.families.transformer_xl.sensitivity import layer_sensitivity
from txl_export.families.transformer_xl.settings import Requested, Sizes, resolve
from txl_export.families.transformer_xl.softmax import SoftmaxHead, SoftmaxTail
from txl_export.families.transformer_xl.step import Step, StepShape
from txl_export.families.transformer_xl.weights import State, check_state, layer_name, model_id, parameter_count
from txl_export.graphs.emulation import EMULATED, runnable
from txl_export.graphs.quantised_matmul import apart, has_many_rows
from txl_export.graphs.quantising import QUANTISED, gain_error, quantise
from txl_export.graphs.tracing import WeightFile, check_graph, write_graph
from txl_export.parity.report import Parity
from txl_export.parity.vectors import selftest_vectors
from txl_export.parity.verification import openers, verify_models
from txl_export.token_files import read_tokens

__all__ = ["ExportResult", "export", "reference_for"]

VOCABULARY = "vocabulary.json"
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4")
FOLDED = (".attention.position.",)
"""Parameters that graphs do not read: what they read is computed from these, in float32."""
FLOAT64_PARAMETERS = 16_000_000
"""Up to this size the reference runs in float64, so that what is measured is the bundle's error alone."""


@dataclass(frozen=True)
class ExportResult:
    """What an export made.

    Attributes:
        path: the bundle.
        manifest: what it says of itself.
        parity: the verification, None with verify=False.
    """

    path: Path
    manifest: Manifest
    parity: Parity | None


def export(
    checkpoint_or_state: str | Path | Mapping[str, Tensor],
    out: str | Path,
    *,
    family: str = "auto",
    config: str | Path | Mapping[str, Any] | None = None,
    segment_length: int | Sequence[int] = (),
    memory_length: int | None = None,
    clamp_length: int | None = None,
    same_length: bool | None = None,
    batch_size: int = 1,
    memory: str | None = None,
    precision: str = "fp32",
    keep: Sequence[str] = (),
    text: str | Path | None = None,
    tokens: str | Path | NDArray[np.integer[Any]] | None = None,
    verify: bool = True,
    force: bool = False,
    vocabulary: str | Path | None = None,
    aliases: Mapping[str, str] | None = None,
    initial_memory: str | None = None,
    cluster_order: str | None = None,
    embedding_scale: float | None = None,
    listener: Listener | None = None,
) -> ExportResult:
    """Turn a trained Transformer-XL into a verified bundle.

    Args:
        checkpoint_or_state: a checkpoint file, or a state dict in memory (which needs `config`).
        out: the bundle's folder; nothing stands under this name until everything has passed.
        family: which code base the checkpoint is from; "auto" recognises it.
        config: the family's own constructor or config.json names, as a mapping or a JSON file.
        segment_length: one or more L; 64 and 1 without it.
        memory_length, clamp_length, same_length: evaluation settings; the file's own without them. A clamp of 0 or
            -1 is none.
        batch_size: B, the most streams that advance together.
        memory: "kv" keeps keys and values, "hidden" the layers' inputs as in the paper. None is kv wherever the
            model allows it: with absolute positions (attn_type 2 and 3) only hidden memory can be kept.
        precision: "fp32"; "fp16" or "bf16" for weights, products and memory of half the bytes, for devices; "int8" or
            "int4" quantise the layers' matrices, for the CPU.
        keep: beginnings of names of matrices to leave in float32, such as "layers.03".
        text, tokens: real text to verify on: a file for the checkpoint's vocabulary, or token ids (.npy or array).
        verify: compare chained segments with PyTorch before the bundle gets its name.
        force: replace an existing bundle.
        vocabulary: a vocabulary file, where the checkpoint holds none (.json, .txt, or the code base's own pickle).
        aliases: classes of forks in a pickled module, and the original's they stand for.
        initial_memory, cluster_order, embedding_scale: "empty" or "zeros", "ascending" or "reversed", and a factor,
            for code that differs there from the family's; as the family has them without.
        listener: hears of stages, progress and warnings.

    Raises:
        TxlError: the checkpoint, an option or the place is not usable; CheckError when a parity gate fails. Nothing
            is left under `out` in that case.
    """
    target, heard = Path(out), listener or Silent()
    if memory not in (None, "kv", "hidden"):
        raise UsageError(f"memory is {memory!r}, expected kv or hidden; check --memory")
    chosen = next((known for known in PRECISIONS if known == precision), None)
    if chosen is None:
        raise UsageError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}; check --precision")
    check_destination(target, force)
    if isinstance(segment_length, str) or not isinstance(checkpoint_or_state, str | PathLike | Mapping):
        raise UsageError(
            f"the checkpoint is {type(checkpoint_or_state).__name__}, segment_length {type(segment_length).__name__}; "
            "expected a path or a state dict, and whole numbers"
        )
    lengths = tuple(segment_length) if isinstance(segment_length, Sequence) else (segment_length,)
    lengths = tuple(int(length) if isinstance(length, np.integer) else length for length in lengths)
    requested = Requested(lengths, memory_length, clamp_length, same_length, batch_size)
    values = read_config(Path(config)) if isinstance(config, str | Path) else config
    overrides = ask_overrides(initial_memory, cluster_order, embedding_scale)

    heard.stage("read the checkpoint")
    imported, source = read_checkpoint(checkpoint_or_state, family, values, aliases, overrides)
    if vocabulary is not None:
        imported = replace(imported, vocabulary=read_vocabulary_file(Path(vocabulary)))
    state = check_state(imported.config, imported.state, source.name)
    dialect, sizes, lines = resolve(imported, requested)
    for line in (*imported.notes, *lines):
        heard.warn(line)
    if min(sizes.segment_lengths) > 1:
        heard.warn("no segment length of 1: generating will run a whole segment for every token")
    words = None
    if imported.vocabulary:
        words = decode_vocabulary(imported.vocabulary, imported.config.vocab_size, str(vocabulary or source.name))
    ids = read_tokens(text, tokens, words, imported.config.vocab_size)
    form: MemoryForm = "hidden" if memory == "hidden" else "kv"
    if memory is None and imported.config.absolute_positions and sizes.memory_length:
        form = "hidden"
        heard.warn(f"attn_type {imported.config.attn_type} keeps positions in its memory: hidden memory")

    with publishing(target, force) as folder:
        builder = _Builder(folder, imported.config, dialect, sizes, form, state, chosen, tuple(keep))
        programs, quantised = builder.graphs(heard)
        if imported.vocabulary:
            (folder / VOCABULARY).write_bytes(imported.vocabulary)
        reference = reference_for(imported.config, dialect, sizes.memory_length, state)
        manifest = builder.manifest(programs, VOCABULARY if imported.vocabulary else None)
        manifest = msgspec.structs.replace(manifest, provenance=_provenance(source, values, aliases))
        heard.stage("compute self-test vectors")
        vectors = selftest_vectors(manifest, reference)
        np.savez_compressed(folder / SELFTEST, allow_pickle=False, **vectors)
        manifest = seal(folder, manifest)
        if precision != "fp32":
            reached = _selftest(folder, manifest)
            vectors["reached"] = np.array([reached.max_logprobs, reached.max_memory])
            np.savez_compressed(folder / SELFTEST, allow_pickle=False, **vectors)
            manifest = seal(folder, manifest)
        parity = None
        if verify:
            if precision in HALF:
                heard.warn(f"{precision} on the CPU is indicative: verify again on the device that the bundle is for")
            with runnable(folder, manifest, "cpu") as runs:
                stand_in = precision if precision == EMULATED else None
                parity = verify_models(
                    openers(runs, manifest, "cpu"), reference, "the checkpoint", ids, None, heard, stand_in_for=stand_in
                )
            if quantised:
                make = partial(reference_for, imported.config, dialect, sizes.memory_length)
                text_or_not = ids if ids is not None else np.arange(2048, dtype=np.int32) % imported.config.vocab_size
                length = sizes.segment_lengths[0]
                parity = replace(
                    parity, sensitivity=layer_sensitivity(make, state, quantised, text_or_not, length, heard)
                ).with_gain(gain_error(fold(imported.config, state), quantised))
            (folder / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(parity.document())))
            parity.require()
            manifest = msgspec.structs.replace(manifest, parity=parity.summary())
        manifest = seal(folder, manifest)
        heard.stage("self-test")
        _selftest(folder, manifest).require()
    return ExportResult(target, manifest, parity)


def _selftest(folder: Path, manifest: Manifest) -> SelftestResult:
    with runnable(folder, manifest, "cpu") as runs:
        return run_selftest(txl_runtime.load(runs, "cpu"))


def reference_for(config: ModelConfig, dialect: Dialect, memory_length: int, state: State) -> Reference:
    """The reference in float64 where the model is small enough for it, else in float32."""
    small = parameter_count(state) <= FLOAT64_PARAMETERS
    return Reference(config, dialect, memory_length, state, torch.float64 if small else torch.float32)


@dataclass(frozen=True)
class _Builder:
    """One bundle's files on their way into a folder."""

    folder: Path
    config: ModelConfig
    dialect: Dialect
    sizes: Sizes
    memory: MemoryForm
    state: State
    precision: Precision
    keep: tuple[str, ...]

    def graphs(self, heard: Listener) -> tuple[list[Program], State]:
        """Write the weight file and the graphs; the programs, and the quantised parts of the weights if there are."""
        folded = to_precision(fold(self.config, self.state), self.precision, keep=FOLDED)
        programs = expected_programs(
            self.config, self._states(), self.sizes.batch_size, self.sizes.segment_lengths, self.updates
        )
        many = self.precision == "int8" and any(has_many_rows(program) for program in programs)
        if many:
            programs = apart(programs)
        graphs = {program.file: program for program in reversed(programs)}  # of those that share one the longest
        networks = {file: self._network(program, folded) for file, program in graphs.items()}
        parts = quantise(to_precision(folded, self.precision), self.precision, self.keep, many)
        tensors = dict(parts)
        for network in networks.values():
            tensors |= network.position_tables()
        tensors |= self._initial_rows()
        path = self.folder / WEIGHTS
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise TxlError(f"{path.name} could not be written ({error}); make room or give another -o") from None
        weights = WeightFile(path, tied_rows(self.config, folded))
        for file, program in graphs.items():
            heard.stage(f"trace and check {file.removesuffix('.onnx')}")
            facts = {"txl-deploy.program": msgspec.json.encode(program).decode()}
            opset = 24 if program.update == "ring" else 18
            write_graph(networks.pop(file), program, weights, self.folder / file, facts, opset, parts)
            check_graph(self.folder / file, program, opset)
        return list(programs), parts if self.precision in QUANTISED else {}

    @property
    def updates(self) -> tuple[str, ...]:
        """The update rules to write: a ring wherever keys and values are remembered."""
        return ("ring", "rolled") if self.memory == "kv" and self.sizes.memory_length else ("rolled",)

    def _network(self, program: Program, folded: State) -> Network:
        """What computes a program."""
        if program.kind == "head":
            return SoftmaxHead(self.config, self.dialect, folded)
        if program.kind.startswith("tail."):
            return SoftmaxTail(self.config, self.dialect, folded, int(program.kind.removeprefix("tail.")))
        sizes = self.sizes
        length = sizes.segment_lengths[0] if program.update == "ring" else program.segment_length
        shape = StepShape(sizes.batch_size, length, sizes.memory_length, self.memory)
        if program.update == "ring":
            return RingStep(self.config, self.dialect, shape, folded)  # open: the longest segment makes the ring
        distances = count_distances(self.config, self.dialect, sizes.memory_length + sizes.segment_lengths[0])
        return Step(self.config, self.dialect, shape, folded, distances)

    def manifest(self, programs: Sequence[Program], vocabulary: str | None) -> Manifest:
        """The manifest, but for files and provenance."""
        return Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            model_id=model_id(self.config, self.dialect, self.sizes.memory_length, self.state),
            config=self.config,
            dialect=self.dialect,
            memory_length=self.sizes.memory_length,
            batch_size=self.sizes.batch_size,
            memory=self.memory,
            precision=self.precision,
            states=self._states(),
            programs=tuple(programs),
            weights=WEIGHTS,
            files={},
            vocabulary=vocabulary,
            parameters=parameter_count(self.state),
        )

    def _states(self) -> tuple[StateTensor, ...]:
        rows = self._initial_rows()
        sizes = self.sizes
        plain = expected_states(
            self.config,
            self.memory,
            sizes.batch_size,
            sizes.memory_length,
            self.updates,
            sizes.segment_lengths[0],
            self.precision,
        )
        named = ((state, f"initial.{state.name}") for state in plain)
        return tuple(msgspec.structs.replace(state, initial=name) if name in rows else state for state, name in named)

    def _initial_rows(self) -> State:
        """What K and V of a row of zeros are, [H, d_head] each, where they are not zero (pre-norm, biases)."""
        if self.dialect.memory_start != "zeros" or self.memory != "kv" or not self.sizes.memory_length:
            return {}
        reference = Reference(self.config, self.dialect, 1, self.state)
        rows: State = {}
        for i, (key, value) in enumerate(reference.keys_and_values(reference.initial_memory())):
            rows[f"initial.{layer_name(i)}.key"] = key[0, 0].clone()
            rows[f"initial.{layer_name(i)}.value"] = value[0, 0].clone()
        return {name: row for name, row in rows.items() if bool(row.any())}


def _provenance(source: Source, values: Mapping[str, Any] | None, aliases: Mapping[str, str] | None) -> dict[str, Any]:
    packages = ("txl-deploy", "torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy", "safetensors")
    return {
        "source": msgspec.to_builtins(source),
        "config": dict(values) if values is not None else None,
        "aliases": dict(aliases) if aliases else None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
