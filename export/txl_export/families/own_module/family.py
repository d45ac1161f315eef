"""Exports a user's own model by its specification, and verifies a bundle against the module.

Implements `families.registry.Family`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import WEIGHTS
from txl_runtime.bundle.tables import Precision
from txl_runtime.bundle.vocabulary import Vocabulary, decode_vocabulary
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.listener import Listener
from txl_runtime.model import load

from txl_export.checkpoints.vocabularies import completed, read_vocabulary_file
from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.building import write_step
from txl_export.families.own_module.by_position import by_position, lifting
from txl_export.families.own_module.capture import Capture, capture
from txl_export.families.own_module.identity import tensors_id
from txl_export.families.own_module.loading import importable
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.probing import run_first_call
from txl_export.families.own_module.reference import ModuleReference
from txl_export.families.own_module.sources import found_source, read_source, whose_code
from txl_export.families.own_module.spec import StepSpec
from txl_export.families.own_module.verifying import check_same_module, replay_vectors, step_vectors, verify_step
from txl_export.families.registry import VerifyRequest
from txl_export.graphs.emulation import EMULATED, runnable
from txl_export.graphs.quantising import QUANTISED
from txl_export.options import FOR_FILES, ExportOptions
from txl_export.proof.input_source import read_samples
from txl_export.proof.parity import Parity
from txl_export.proof.stepwise import stepwise
from txl_export.proof.threads import engine_threads
from txl_export.token_files import read_tokens

FOR_CHECKPOINTS = (
    *("family", "memory_length", "clamp_length", "same_length", "memory", "keep", "aliases"),
    *("initial_memory", "cluster_order", "embedding_scale", "extended_length", "lookup", "features"),
)
"""Options that apply only to Transformer-XL checkpoints, so a model of the user's own refuses them."""


@dataclass
class PreparedStep:
    """A module that was run and planned, ready to become a bundle; implements `Prepared`.

    Attributes:
        plan: the step and its shapes.
        precision: the bundle's precision.
        growth: form of the graphs of growing states, "auto", "symbolic" or "stages".
        family: facts about the module for the manifest.
        vocabulary: the vocabulary as bundle JSON, or None.
        provenance: the model's origin, for the manifest.
        source: the name of what the bundle is compared with, for reports.
        make: captures graphs.
        rounds: whether `make` returns graphs that already have this precision, so that they are not converted.
    """

    plan: Plan
    precision: Precision
    growth: str
    family: Mapping[str, Any]
    vocabulary: bytes | None
    provenance: Mapping[str, Any]
    source: str = "the module itself"
    make: Capture = capture
    rounds: bool = False

    def write(self, folder: Path, listener: Listener) -> Manifest:
        """Capture and write the graphs; return the manifest (see `Prepared.write`)."""
        plan = self.plan
        asked = "fp32" if self.rounds else self.precision
        written = write_step(folder, plan, asked, self.growth, listener, self.make)
        if written.note:
            listener.warn(f"there is a graph for every size of the state: {written.note}")
        if written.fixed:
            listener.warn(f"a segment costs {plan.batch_size} sequences however few of them run: {written.fixed}")
        manifest = plan.manifest(
            written.programs,
            model_id=written.model_id,
            precision=self.precision,
            family={
                **self.family,
                "tensors": tensors_id(plan.spec),
                "lockstep": plan.reason,
                "fixed": written.fixed,
                "growth": "" if written.growth == "none" else written.growth,
                "route": ", ".join(sorted({str(route) for route in written.routes.values()})),
            },
            weights=WEIGHTS,
            parameters=written.parameters,
        )
        steps = stepwise(manifest, partial(ModuleReference, plan))
        return msgspec.structs.replace(manifest, stepwise=steps)

    def vectors(self, manifest: Manifest) -> dict[str, NDArray[Any]]:
        """Return the vectors of the self-test (see `Prepared.vectors`).

        For example, {"counts": an array [3, 2]} for three steps of two sequences.
        """
        return step_vectors(self.plan, manifest)

    def verify(self, folder: Path, manifest: Manifest, listener: Listener) -> Parity:
        """Compare the bundle with the module (see `Prepared.verify`)."""
        emulated = manifest.precision == EMULATED
        with runnable(folder, manifest, "cpu") as runs:
            opener = partial(load, runs, "cpu", engine_threads(manifest, None))
            stand_in = EMULATED if emulated else None
            return verify_step(opener, self.plan, self.source, None, listener, stand_in)


def prepare(source: StepSpec | str | Path | Adapted, options: ExportOptions, listener: Listener) -> PreparedStep:
    """Run the user's module and plan its bundle (see `Family.prepare`)."""
    adapted = isinstance(source, Adapted)
    options.refuse(FOR_FILES, "an ONNX file, and this is a model of your own")
    options.refuse(
        FOR_CHECKPOINTS if adapted else (*FOR_CHECKPOINTS, "config"),
        "a Transformer-XL's checkpoint, and this is a model of your own",
    )
    if options.precision in QUANTISED:
        raise UsageError(
            f"precision is {options.precision}, which is for a Transformer-XL's matrices, expected fp32, fp16 or bf16 "
            "for a model of your own; check --precision"
        )
    if isinstance(source, Adapted) and source.told:
        listener.warn(source.told)
    if whose := whose_code(source):
        listener.warn(f"{whose} is run on this machine; of it, only graphs and weights enter the bundle")
    source_spec, name = read_source(source, options.weights)
    spec, vocabulary = with_data(by_position(source_spec, options.segment_lengths), options)
    with importable(source):
        batch_size, *others = options.batch_sizes
        if others:
            raise UsageError(
                f"--batch-size is {', '.join(map(str, options.batch_sizes))}, expected one for a model of your own, "
                "which takes any number up to it on the CPU; export a bundle for each B that engines are to have"
            )
        plan = make_plan(spec, batch_size, options.segment_lengths, listener)
    make = capture if spec.has_length is source_spec.has_length else lifting(plan, lambda _: capture)
    weights = source.file if isinstance(source, Adapted) else options.weights and Path(options.weights).name
    provenance = {"source": {"name": name, "weights": weights}}
    family = {**(source_spec.facts or {}), "name": "own_module", "module": name}
    precision = cast(Precision, options.precision or "fp32")
    return PreparedStep(plan, precision, options.growth, family, vocabulary, provenance, make=make)


def with_data(spec: StepSpec, options: ExportOptions) -> tuple[StepSpec, bytes | None]:
    """Return a specification with the options' real inputs, text and vocabulary, and the vocabulary as bundle JSON.

    Raises:
        TxlError: a file cannot be read, or does not fit this model.
    """
    if options.vocabulary is not None:
        spec = replace(spec, vocabulary=options.vocabulary)
    tokens = next((entry.tokens for entry in spec.inputs if entry.tokens), 0)
    source = "the vocabulary" if isinstance(spec.vocabulary, Mapping) else str(spec.vocabulary)
    vocabulary = completed(_vocabulary(spec), tokens, options, source)
    if options.inputs is not None:
        spec = replace(spec, samples=read_samples(Path(options.inputs)))
    words = None if vocabulary is None else decode_vocabulary(vocabulary, tokens, source)
    return _with_text(spec, words, options.text, options.tokens), vocabulary


def verify(request: VerifyRequest, listener: Listener) -> tuple[Parity, bytes | None]:
    """Compare a bundle with its module, or without --module replay its stored vectors (see `Family.verify`)."""
    bundle, manifest, backend = request.bundle, request.bundle.manifest, request.backend
    module = request.module if request.checkpoint is None else found_source(request.checkpoint)
    if request.checkpoint is not None and not isinstance(module, Adapted):
        raise UsageError(
            f"{bundle.path}: is the bundle of a model of your own, --checkpoint is for a Transformer-XL's or a "
            "trainer's folder; give --module FILE.py:FUNCTION or --adapter NAME, and --weights"
        )
    emulated = manifest.precision == EMULATED and backend in ("auto", "cpu")
    backend = "cpu" if emulated else backend
    with runnable(bundle.path, manifest, backend) as folder:
        opener = partial(load, folder, backend, engine_threads(manifest, request.threads))
        if module is None:
            if request.weights is not None:
                raise UsageError(
                    "--weights is given without --module; give --module FILE.py:FUNCTION or --adapter NAME too"
                )
            listener.warn(
                "the bundle's own vectors are replayed; --module FILE.py:FUNCTION or --adapter NAME compares it with "
                "the module"
            )
            return replay_vectors(opener, manifest.precision, listener), None
        if whose := whose_code(module):
            listener.warn(f"{whose} is run on this machine")
        spec, name = read_source(module, request.weights)
        spec = by_position(spec, manifest.segment_lengths)
        run_first_call(spec, manifest.batch_size, manifest.segment_lengths)
        check_same_module(spec, name, bundle, listener)
        spec = _with_text(spec, bundle.vocabulary(), request.text, request.tokens)
        with importable(module):
            plan = make_plan(spec, manifest.batch_size, manifest.segment_lengths, listener)
        stand_in = EMULATED if emulated else None
        return verify_step(opener, plan, "the module itself", request.segments, listener, stand_in), _vocabulary(spec)


def _vocabulary(spec: StepSpec) -> bytes | None:
    """Return the specification's vocabulary as bundle JSON; None if there is no vocabulary."""
    vocabulary = spec.vocabulary
    if isinstance(vocabulary, Mapping):
        sizes = [entry.tokens for entry in spec.inputs if entry.tokens is not None]
        try:
            decode_vocabulary(written := msgspec.json.encode(vocabulary), max(sizes, default=0), "the vocabulary")
        except (TxlError, TypeError, ValueError, OverflowError) as error:  # JSON cannot express some values
            reason = str(error).removeprefix("the vocabulary: ").partition(";")[0]
            raise UsageError(f"the vocabulary: {reason}; expected one such as {{'kind': 'bytes'}}") from None
        return written
    return None if vocabulary is None else read_vocabulary_file(Path(vocabulary))


def _with_text(spec: StepSpec, words: Vocabulary | None, text: str | Path | None, tokens: Any) -> StepSpec:
    """Return the specification with the tokens of a real text as samples of its token input."""
    if text is None and tokens is None:
        return spec
    read = [entry for entry in spec.inputs if entry.tokens is not None]
    if len(read) != 1:
        raise UsageError("--text and --tokens are for a model with one input of token ids; give --inputs FILE.npz")
    entry = read[0]
    assert entry.tokens is not None
    ids = read_tokens(text, tokens, words, entry.tokens)
    assert ids is not None
    places = entry.axes.positions
    shaped = ids.reshape([-1 if axis in places else 1 for axis in range(len(entry.shape))]) if places else ids
    return replace(spec, samples={**(spec.samples or {}), entry.name: shaped})
