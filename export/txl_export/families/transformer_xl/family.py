"""Exports a Transformer-XL's checkpoint of any code base, and verifies a bundle against it.

Implements `families.registry.Family`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import msgspec
from numpy.typing import NDArray
from torch import Tensor
from txl_report.calibration import LEAST, RECORD, begins_with_fitted, fitted, record, unfitted
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Precision
from txl_runtime.bundle.vocabulary import decode_vocabulary
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.listener import Listener
from txl_runtime.types import Ids

from txl_export.checkpoints import read_checkpoint, read_config
from txl_export.checkpoints.overrides import ask_overrides, recorded_overrides
from txl_export.checkpoints.vocabularies import completed, read_vocabulary_file
from txl_export.families.registry import VerifyRequest
from txl_export.families.transformer_xl.building import Builder, reference_for
from txl_export.families.transformer_xl.calibrating import split
from txl_export.families.transformer_xl.folding import HALF, QUANTISABLE, fold, unfold
from txl_export.families.transformer_xl.parity.oracle import Oracle
from txl_export.families.transformer_xl.parity.vectors import selftest_vectors
from txl_export.families.transformer_xl.parity.verification import verify_models
from txl_export.families.transformer_xl.settings import memory_form, resolve
from txl_export.families.transformer_xl.weights import Weights, check_weights, layer_name, model_id
from txl_export.graphs.emulation import EMULATED, runnable
from txl_export.graphs.quantising import QUANTISED, dequantise, gain_error, is_kept
from txl_export.graphs.shared_weights import read_weight_file
from txl_export.options import FOR_FILES, ExportOptions
from txl_export.proof.parity import Parity
from txl_export.proof.stepwise import MOST, stepwise
from txl_export.proof.verification import openers
from txl_export.token_files import read_tokens

Checkpoint = str | PathLike[str] | Mapping[str, Tensor]
FOR_OWN_MODULES = ("weights", "inputs", "growth")
"""Options of an export that apply only to modules of the user's own, so a checkpoint refuses them."""
NOT_THE_TEXT = "the text does not begin with all of them; if it holds some, its figures flatter the bundle"
HARDLY_MORE = (
    f"the text's first, and fewer than {LEAST} follow, so all of it judges, and its figures flatter the bundle"
)


@dataclass
class PreparedModel:
    """A checkpoint, read and checked, ready to become a bundle; implements `Prepared`."""

    builder: Builder
    calibration: Ids | None
    text: Ids | None
    vocabulary: bytes | None
    provenance: Mapping[str, Any]
    quantised: Weights

    def write(self, folder: Path, listener: Listener) -> Manifest:
        """Write weight file and graphs; return the manifest (see `Prepared.write`)."""
        programs, self.quantised = self.builder.write(folder, listener, self.calibration)
        return self.builder.manifest(programs)

    def vectors(self, manifest: Manifest) -> dict[str, NDArray[Any]]:
        """Return the vectors of the self-test (see `Prepared.vectors`).

        For example, {"length": an array [3]} for three steps.
        """
        return selftest_vectors(manifest, self.builder.reference())

    def verify(self, folder: Path, manifest: Manifest, listener: Listener) -> Parity:
        """Compare the bundle with the checkpoint's reference (see `Prepared.verify`)."""
        precision = manifest.precision
        if precision in HALF:
            listener.warn(f"{precision} on the CPU is indicative: verify again on the device that the bundle is for")
        with runnable(folder, manifest, "cpu") as runs:
            ways, stand_in = openers(runs, manifest, "cpu"), precision if precision == EMULATED else None
            reference = self.builder.reference()
            parity = verify_models(manifest, ways, reference, "the checkpoint", self.text, None, listener, stand_in)
        claimed = min(manifest.stepwise or 1, MOST)
        steps = stepwise(manifest, lambda: Oracle(reference, self.builder.memory)) if claimed > 1 else 1
        if steps is None or steps < claimed:
            raise CheckError(
                f"segments of {steps} tokens give what single steps give, expected up to {claimed} by the model's "
                "window; report the checkpoint's family and config"
            )
        if self.quantised:
            sensitivity, gain = self.builder.quantisation(self.quantised, self.text, listener)
            parity = replace(parity, sensitivity=sensitivity).with_gain(gain)
        return parity if self.calibration is None else parity.behind(len(self.calibration))


def prepare(source: Checkpoint, options: ExportOptions, listener: Listener) -> PreparedModel:
    """Read and check a checkpoint for an export (see `Family.prepare`)."""
    options.refuse(FOR_FILES, "an ONNX file, and this is a checkpoint")
    options.refuse(FOR_OWN_MODULES, "a model of your own, FILE.py:FUNCTION, and this is a checkpoint")
    config = read_config(Path(options.config)) if isinstance(options.config, str | Path) else options.config
    if options.extended_length is not None:
        config = {**(config or {}), "ext_len": options.extended_length}
    overrides = ask_overrides(options.initial_memory, options.cluster_order, options.embedding_scale)

    listener.stage("read the checkpoint")
    imported, found = read_checkpoint(
        source if isinstance(source, Mapping) else Path(source), options.family, config, options.aliases, overrides
    )
    vocabulary, whose = imported.vocabulary, found.name
    if options.vocabulary is not None:
        vocabulary, whose = read_vocabulary_file(Path(options.vocabulary)), str(options.vocabulary)
    weights = check_weights(imported.config, imported.weights, found.name)
    dialect, sizes, lines = resolve(imported, options)
    for line in (*imported.notes, *lines):
        listener.warn(line)
    if min(sizes.segment_lengths) > 1:
        listener.warn("no segment length of 1: generating will run a whole segment for every token")
    vocabulary = completed(vocabulary, imported.config.vocab_size, options, whose)
    words = None if vocabulary is None else decode_vocabulary(vocabulary, imported.config.vocab_size, whose)
    text = read_tokens(options.text, options.tokens, words, imported.config.vocab_size)
    form = memory_form(imported.config, sizes, options, listener)
    precision = cast(Precision, options.precision or "fp32")
    layers = map(layer_name, range(imported.config.n_layer))
    float_layers = all(is_kept(layer + end, options.keep) for layer in layers for end in QUANTISABLE)
    calibration, text = split(text, precision == "int4" and not float_layers, listener)
    builder = Builder(imported.config, dialect, sizes, weights, form, precision, options.keep, options.features)
    provenance = {
        "source": msgspec.to_builtins(found),
        "config": dict(config) if config is not None else None,
        "aliases": dict(options.aliases) if options.aliases else None,
    }
    if calibration is not None:
        provenance[RECORD] = record(calibration)
    return PreparedModel(builder, calibration, text, vocabulary, provenance, {})


def verify(request: VerifyRequest, listener: Listener) -> tuple[Parity, bytes | None]:
    """Compare a bundle with its reference (see `Family.verify`)."""
    opened, backend = request.bundle, request.backend
    manifest = opened.manifest
    if request.module is not None or request.weights is not None:
        raise UsageError(
            f"{opened.path}: is a Transformer-XL's bundle, --module, --adapter and --weights are for models of your "
            "own; give --checkpoint"
        )
    model = manifest.transformer_xl
    ids = read_tokens(request.text, request.tokens, opened.vocabulary(), manifest.vocab_size)
    left_out = 0
    if ids is not None and (known := fitted(manifest)):
        ids, left_out = unfitted(manifest, ids)
        remark = HARDLY_MORE if begins_with_fitted(manifest, ids) else NOT_THE_TEXT
        if left_out:
            remark = f"the text's first; the other {len(ids):,} judge"
        listener.warn(f"int4 matrices were fitted to {known:,} tokens: {remark}")
    if request.checkpoint is None:
        listener.warn("the reference is rebuilt from the bundle; the import is not repeated (--checkpoint repeats it)")
        weights, source = weights_of_bundle(opened.file(manifest.weights), manifest), "the bundle's own weights"
        vocabulary = None
    else:
        (weights, vocabulary), source = read_again(request.checkpoint, manifest), "the checkpoint"
    reference = reference_for(model.config, model.dialect, manifest.memory_length, weights)
    emulated = manifest.precision == EMULATED and backend in ("auto", "cpu")
    if emulated:
        backend = "cpu"
        listener.warn(
            "bf16 on the CPU is indicative: a float32 copy that rounds to bf16; --backend rtx runs the real one"
        )
    with runnable(opened.path, manifest, backend) as folder:
        runs = openers(folder, manifest, backend, request.threads)
        stand_in = manifest.precision if emulated else None
        parity = verify_models(manifest, runs, reference, source, ids, request.segments, listener, stand_in)
    if request.checkpoint is not None and manifest.precision in QUANTISED:
        stored = read_weight_file(opened.file(manifest.weights))
        parity = parity.with_gain(gain_error(fold(model.config, weights), stored))
    return parity.behind(left_out), vocabulary


def weights_of_bundle(path: Path, manifest: Manifest) -> Weights:
    """Return the canonical weights of a bundle, exact up to one rounding of the folded scale."""
    own = (".table.", "initial.")
    stored = read_weight_file(path).items()
    pairs = ((name, tensor) for name, tensor in stored if not any(part in name for part in own))
    folded = {name: tensor.float() if tensor.dtype in HALF.values() else tensor for name, tensor in pairs}
    return check_weights(manifest.config, unfold(manifest.config, dequantise(folded)), path.name)


def read_again(checkpoint: Path, manifest: Manifest) -> tuple[Weights, bytes | None]:
    """Read the checkpoint that a bundle was made from; return its weights, and its vocabulary or None.

    Raises:
        CheckError: the checkpoint holds a different model.
    """
    values, aliases = (manifest.provenance.get(name) for name in ("config", "aliases"))
    recorded = manifest.transformer_xl.dialect
    imported, source = read_checkpoint(
        checkpoint,
        recorded.family,
        values if isinstance(values, dict) else None,
        aliases if isinstance(aliases, dict) else None,
        recorded_overrides(manifest.provenance),
    )
    asked = ExportOptions(
        segment_length=manifest.segment_lengths,
        memory_length=manifest.memory_length,
        clamp_length=recorded.clamp_length or 0,
        same_length=recorded.window is not None or recorded.segment_window,
        lookup=recorded.single_steps is not None,
        batch_size=manifest.batch_size,
    )
    dialect, sizes, _ = resolve(imported, asked)
    weights = check_weights(imported.config, imported.weights, source.name)
    identity = model_id(imported.config, dialect, sizes.memory_length, weights)
    if identity != manifest.model_id:
        raise CheckError(
            f"{checkpoint}: is model {identity[:12]}, the bundle was made from {manifest.model_id[:12]}; "
            "verify against the checkpoint it came from, or export this one"
        )
    return weights, imported.vocabulary
