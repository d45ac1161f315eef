"""Verification of a bundle that exists already, and the search for the layer where it first differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.listener import Listener, Silent

from txl_export.checkpoints import read_checkpoint
from txl_export.checkpoints.overrides import recorded_overrides
from txl_export.families.transformer_xl.building import reference_for
from txl_export.families.transformer_xl.folding import HALF, fold, unfold
from txl_export.families.transformer_xl.settings import resolve
from txl_export.families.transformer_xl.weights import Weights, check_weights, model_id
from txl_export.graphs.emulation import EMULATED, runnable
from txl_export.graphs.quantising import QUANTISED, dequantise, gain_error
from txl_export.options import ExportOptions
from txl_export.parity.bisecting import Bisection, bisect_against_reference, bisect_engine
from txl_export.parity.report import Parity
from txl_export.parity.verification import openers, verify_models
from txl_export.token_files import read_tokens


def verify(
    bundle: str | Path,
    *,
    checkpoint: str | Path | None = None,
    text: str | Path | None = None,
    tokens: str | Path | NDArray[np.integer[Any]] | None = None,
    segments: int | None = None,
    backend: str = "auto",
    threads: int | None = None,
    listener: Listener | None = None,
) -> Parity:
    """Compare a bundle with PyTorch over chained segments.

    Args:
        bundle: its folder.
        checkpoint: what it was exported from, so that the import is repeated; without it the reference is
            rebuilt from the bundle's own weights.
        text, tokens: real text for the distribution and task gates.
        segments: of the longest chain.
        backend, threads: as `txl_runtime.load`.
        listener: hears of progress and warnings.

    Raises:
        TxlError: the bundle, the checkpoint or an option is not usable; CheckError when the checkpoint holds another
            model. A failed gate does not raise here: look at the result's `passed`.
    """
    heard = listener or Silent()
    if segments is not None and not 1 <= segments <= 1_000_000:
        raise UsageError(f"--segments is {segments}, expected 1 … 1000000")
    opened = open_bundle(bundle)
    manifest = opened.manifest
    words = opened.vocabulary()
    ids = read_tokens(text, tokens, words, manifest.config.vocab_size)
    if checkpoint is None:
        heard.warn("the reference is rebuilt from the bundle; the import is not repeated (--checkpoint repeats it)")
        weights, source = weights_of_bundle(opened.file(manifest.weights), manifest), "the bundle's own weights"
    else:
        weights, source = _weights_of_checkpoint(Path(checkpoint), manifest), "the checkpoint"
    reference = reference_for(manifest.config, manifest.dialect, manifest.memory_length, weights)
    emulated = manifest.precision == EMULATED and backend in ("auto", "cpu")
    if emulated:
        backend = "cpu"
        heard.warn("bf16 on the CPU is indicative: a float32 copy that rounds to bf16; --backend rtx runs the real one")
    with runnable(Path(bundle), manifest, backend) as folder:
        runs = openers(folder, manifest, backend, threads)
        stand_in = manifest.precision if emulated else None
        parity = verify_models(runs, reference, source, ids, segments, heard, stand_in_for=stand_in)
    if checkpoint is not None and manifest.precision in QUANTISED:
        stored = load_file(opened.file(manifest.weights))
        parity = parity.with_gain(gain_error(fold(manifest.config, weights), stored))
    return parity


def bisect(bundle: str | Path, checkpoint: str | Path | None = None, backend: str = "auto") -> Bisection:
    """Which layer of a bundle differs first.

    Args:
        bundle: its folder.
        checkpoint: what it was exported from. Without it the reference is made of the bundle's own weights, so a
            weight that is wrong in the bundle is as wrong in the reference.
        backend: "rtx" or "tensorrt" for the engine against ONNX Runtime; else ONNX Runtime against the reference.

    Raises:
        TxlError: the bundle, the checkpoint or the backend cannot be used.
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if backend not in ("auto", "cpu", "rtx", "tensorrt"):
        raise UsageError(f"backend is {backend!r}, which cannot be taken apart; expected cpu, rtx, tensorrt or auto")
    if backend in ("rtx", "tensorrt"):
        return bisect_engine(opened, backend)
    if checkpoint is None:
        weights = weights_of_bundle(opened.file(manifest.weights), manifest)
    else:
        weights = _weights_of_checkpoint(Path(checkpoint), manifest)
    reference = reference_for(manifest.config, manifest.dialect, manifest.memory_length, weights)
    return bisect_against_reference(opened, reference)


def weights_of_bundle(path: Path, manifest: Manifest) -> Weights:
    """The canonical weights that a bundle's weight file stands for, to one rounding of what was folded into them."""
    own = (".table.", "initial.")
    stored = ((name, tensor) for name, tensor in load_file(path).items() if not any(part in name for part in own))
    folded = {name: tensor.float() if tensor.dtype in HALF.values() else tensor for name, tensor in stored}
    return check_weights(manifest.config, unfold(manifest.config, dequantise(folded)), path.name)


def _weights_of_checkpoint(checkpoint: Path, manifest: Manifest) -> Weights:
    """The checkpoint's parameters, which must be the very ones the bundle was made from."""
    values, aliases = (manifest.provenance.get(name) for name in ("config", "aliases"))
    imported, source = read_checkpoint(
        checkpoint,
        manifest.dialect.family,
        values if isinstance(values, dict) else None,
        aliases if isinstance(aliases, dict) else None,
        recorded_overrides(manifest.provenance),
    )
    clamp, same = manifest.dialect.clamp_length, manifest.dialect.window is not None or manifest.dialect.segment_window
    asked = ExportOptions(
        segment_length=manifest.segment_lengths,
        memory_length=manifest.memory_length,
        clamp_length=clamp or 0,
        same_length=same,
        batch_size=manifest.batch_size,
    )
    dialect, sizes, _ = resolve(imported, asked)
    weights = check_weights(imported.config, imported.weights, source.name)
    found = model_id(imported.config, dialect, sizes.memory_length, weights)
    if found != manifest.model_id:
        raise CheckError(
            f"{checkpoint}: is model {found[:12]}, the bundle was made from {manifest.model_id[:12]}; "
            "verify against the checkpoint it came from, or export this one"
        )
    return weights
