"""Verification of an existing bundle or an ONNX file, and the search for the layer where a bundle first differs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import CheckpointError, UsageError, some
from txl_runtime.listener import Listener, Silent

from txl_export.checkpoints.vocabularies import differences, read_vocabulary_file
from txl_export.families.graph.against_bundle import verify_beside
from txl_export.families.graph.against_module import verify_file
from txl_export.families.graph.matching import Said
from txl_export.families.graph.take.reading import MOST_BYTES
from txl_export.families.own_module.sources import asked_module
from txl_export.families.own_module.spec import StepSpec
from txl_export.families.registry import VerifyRequest, family_of_bundle
from txl_export.families.transformer_xl.building import reference_for
from txl_export.families.transformer_xl.family import read_again, weights_of_bundle
from txl_export.families.transformer_xl.parity.bisecting import Bisection, bisect_against_reference, bisect_engine
from txl_export.proof.input_source import read_samples
from txl_export.proof.parity import Parity
from txl_export.proof.verification import openers
from txl_export.regular import read_regular


def verify(
    bundle: str | Path,
    *,
    checkpoint: str | Path | None = None,
    module: str | StepSpec | None = None,
    weights: str | Path | None = None,
    adapter: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    vocabulary: str | Path | None = None,
    text: str | Path | None = None,
    tokens: str | Path | NDArray[np.integer[Any]] | None = None,
    segments: int | None = None,
    inputs: str | Path | None = None,
    states: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
    backend: str = "auto",
    threads: int | None = None,
    listener: Listener | None = None,
) -> Parity:
    """Compare a bundle, or an ONNX file made elsewhere, with PyTorch over chained segments.

    Args:
        bundle: its folder; or an ONNX file, which needs `module` or `adapter` and runs in a process of its own.
        checkpoint: the file it was exported from, whose import is repeated; without it the reference is rebuilt from
            the bundle's own weights. Or an ONNX file that it was not made of: both stream the same inputs.
        module, weights: for a model of your own, FILE.py:FUNCTION (or its `StepSpec`) and its weights; without it the
            bundle's stored vectors are replayed.
        adapter, config: in place of module: the package whose model it is, and the arguments of its constructor;
            `weights` is its checkpoint then.
        vocabulary: vocabulary file to compare the bundle's with, in place of the checkpoint's or the module's own; as
            for `export`.
        text, tokens: real text for the distribution and task gates.
        segments: number of segments in the longest chain.
        inputs, states, rename: for an ONNX file: an .npz file of real inputs and of further ones that the file takes;
            its inputs that are states → the outputs that are their next values, if names do not match; and its names →
            the module's or the bundle's for the same tensors.
        backend, threads: as for `txl_runtime.load`.
        listener: receives progress and warnings.

    Raises:
        TxlError: the bundle, the checkpoint or an option is not usable; CheckError if the checkpoint holds a different
            model. A failed gate does not raise here: look at the result's `passed`.
    """
    if segments is not None and not 1 <= segments <= 1_000_000:
        raise UsageError(f"--segments is {segments}, expected 1 … 1000000")
    if str(bundle).endswith(".onnx") and not Path(bundle).is_dir():
        others: dict[str, object] = {"checkpoint": checkpoint, "vocabulary": vocabulary, "text": text, "tokens": tokens}
        others |= {"threads": threads, "backend": None if backend in ("auto", "cpu") else backend}
        _refuse(bundle, others)
        asked = asked_module(module, weights, adapter, config)
        if asked is None:
            raise UsageError(f"{bundle}: is an ONNX file, expected the module to compare it with; give --module")
        beside, said = weights if adapter is None else None, _said(inputs, states, rename)
        return verify_file(Path(bundle), asked, beside, said, segments, listener or Silent())
    opened = open_bundle(bundle)
    if str(checkpoint).endswith(".onnx") and not _made_of(Path(str(checkpoint)), opened.manifest):
        others = {"module": module, "adapter": adapter, "weights": weights, "config": config}
        _refuse(checkpoint, others | {"vocabulary": vocabulary, "text": text, "tokens": tokens})
        opener, *_ = openers(opened.path, opened.manifest, backend, threads)
        said = _said(inputs, states, rename)
        return verify_beside(opener, Path(str(checkpoint)), said, segments, listener or Silent())
    if inputs is not None or states is not None or rename is not None:
        raise UsageError(
            "--inputs, --state and --rename are for a FILE.onnx that the bundle was not made of; give it as "
            "--checkpoint, or leave them out"
        )
    if vocabulary is not None and not opened.manifest.vocabulary:
        raise UsageError(f"{bundle}: has no vocabulary to compare, and --vocabulary is given; leave it out")
    given = None if vocabulary is None else read_vocabulary_file(Path(vocabulary))
    request = VerifyRequest(
        bundle=opened,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        module=asked_module(module, weights, adapter, config),
        weights=weights if adapter is None else None,
        text=text,
        tokens=tokens,
        segments=segments,
        backend=backend,
        threads=threads,
    )
    parity, own = family_of_bundle(opened.manifest).verify(request, listener or Silent())
    if not opened.manifest.vocabulary:
        return parity
    source = Path(vocabulary).name if vocabulary is not None else "checkpoint" if checkpoint is not None else "module"
    other = given or own
    return parity.with_words(None if other is None else differences(opened, other, source, listener or Silent()))


def _refuse(path: object, options: Mapping[str, object]) -> None:
    """Refuse options that were given and do not apply to an ONNX file."""
    if wrong := [f"--{name}" for name, value in options.items() if value is not None]:
        raise UsageError(f"{path}: is an ONNX file, which has no use for {some(wrong)}; leave it out")


def _said(inputs: str | Path | None, states: Mapping[str, str] | None, rename: Mapping[str, str] | None) -> Said:
    return Said(rename or {}, states or {}, {} if inputs is None else read_samples(Path(inputs)))


def _made_of(path: Path, manifest: Manifest) -> bool:
    """Return whether the bundle was made of this very file, by its SHA-256."""
    with contextlib.suppress(OSError, CheckpointError):  # a file that cannot be read: its later reader says why
        return manifest.family.get("sha256") == hashlib.sha256(read_regular(path, MOST_BYTES)).hexdigest()
    return False


def bisect(bundle: str | Path, checkpoint: str | Path | None = None, backend: str = "auto") -> Bisection:
    """Find the layer of a bundle that differs first.

    Args:
        bundle: its folder.
        checkpoint: the file it was exported from. Without it the reference is made of the bundle's own weights, so a
            wrong weight of the bundle is wrong in the reference too.
        backend: "rtx" or "tensorrt" for the engine against ONNX Runtime; else ONNX Runtime against the reference.

    Raises:
        TxlError: the bundle, the checkpoint or the backend cannot be used.
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if manifest.family_name != "transformer_xl":
        raise UsageError(
            f"{opened.path}: is of family {manifest.family_name!r}, --bisect looks into a Transformer-XL's layers; "
            "`txl-deploy verify` without it names the output and the state that differ"
        )
    if backend not in ("auto", "cpu", "rtx", "tensorrt"):
        raise UsageError(f"backend is {backend!r}, which cannot be taken apart; expected cpu, rtx, tensorrt or auto")
    if backend in ("rtx", "tensorrt"):
        return bisect_engine(opened, backend)
    if checkpoint is None:
        weights = weights_of_bundle(opened.file(manifest.weights), manifest)
    else:
        weights, _ = read_again(Path(checkpoint), manifest)
    reference = reference_for(manifest.config, manifest.dialect, manifest.memory_length, weights)
    return bisect_against_reference(opened, reference)
