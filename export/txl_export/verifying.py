"""Verifies existing bundles and ONNX files, and finds the first layer of a bundle that differs from the reference."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.engines.sidecar import MOST_REACHED
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.errors import CheckError, CheckpointError, UsageError, some
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import load
from txl_runtime.selftest import run_selftest

from txl_export.checkpoints.vocabularies import differences, read_vocabulary_file
from txl_export.families.graph.against_bundle import verify_beside
from txl_export.families.graph.against_module import verify_file
from txl_export.families.graph.matching import FileOptions
from txl_export.families.graph.take.reading import MOST_BYTES
from txl_export.families.own_module.sources import asked_module
from txl_export.families.own_module.spec import StepSpec
from txl_export.families.registry import VerifyRequest, family_of_bundle
from txl_export.families.transformer_xl.building import reference_for
from txl_export.families.transformer_xl.family import read_again, weights_of_bundle
from txl_export.families.transformer_xl.parity.bisecting import Bisection, bisect_against_reference, bisect_engine
from txl_export.families.transformer_xl.parity.verification import verify_models
from txl_export.graphs.emulation import runnable
from txl_export.proof.input_source import read_samples
from txl_export.proof.parity import Parity
from txl_export.proof.rounded import BundleReference, opened_for_rtx
from txl_export.proof.verification import openers, verify_model
from txl_export.regular import read_regular
from txl_export.token_files import read_tokens


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
        bundle: the bundle's folder; or an ONNX file, which needs `module` or `adapter` and runs in a separate process.
        checkpoint: the file that the bundle was exported from, to repeat the import; without it the reference is
            rebuilt from the bundle's own weights. Or an ONNX file that the bundle was not made of: bundle and file
            stream the same inputs.
        module, weights: for a model of your own, FILE.py:FUNCTION (or its `StepSpec`) and its weights. Without module,
            the bundle's stored vectors are replayed.
        adapter, config: in place of module, the adapter of the model's package and the constructor's arguments;
            `weights` is then the package's checkpoint.
        vocabulary: vocabulary file that the bundle's vocabulary is compared with, in place of the checkpoint's or
            module's; `export` takes the same files.
        text, tokens: real text, or its token ids, for gates on the distribution and the perplexity.
        segments: number of segments in the longest chain.
        inputs, states, rename: for an ONNX file. inputs: an .npz file of real inputs, and of constant inputs that only
            the ONNX file has. states: {input: output}, the output that gives a state's next value, if the names do not
            show it. rename: {name in the ONNX file: name in the module or bundle}.
        backend, threads: as for `txl_runtime.load`.
        listener: receives progress and warnings.

    Raises:
        TxlError: the bundle, the checkpoint or an option is not usable; CheckError if the checkpoint holds a different
            model. A failed gate raises nothing: see the result's `passed`.
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
        beside, options = weights if adapter is None else None, _file_options(inputs, states, rename)
        return verify_file(Path(bundle), asked, beside, options, segments, listener or Silent())
    opened = open_bundle(bundle)
    if str(checkpoint).endswith(".onnx") and not _made_of(Path(str(checkpoint)), opened.manifest):
        others = {"module": module, "adapter": adapter, "weights": weights, "config": config}
        _refuse(checkpoint, others | {"vocabulary": vocabulary, "text": text, "tokens": tokens})
        opener, *_ = openers(opened.path, opened.manifest, backend, threads)
        options = _file_options(inputs, states, rename)
        return verify_beside(opener, Path(str(checkpoint)), options, segments, listener or Silent())
    if inputs is not None or states is not None or rename is not None:
        raise UsageError(
            "--inputs, --state and --rename are for a FILE.onnx that the bundle was not made of; give it as "
            "--checkpoint, or leave them out"
        )
    if vocabulary is not None and not opened.manifest.vocabulary:
        raise UsageError(f"{bundle}: has no vocabulary to compare, and --vocabulary is given; leave it out")
    words = None if vocabulary is None else read_vocabulary_file(Path(vocabulary))
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
    other = words or own
    return parity.with_words(None if other is None else differences(opened, other, source, listener or Silent()))


def verify_rounded(
    bundle: Bundle,
    copy: Path,
    precision: str,
    text: str | Path | None = None,
    tokens: str | Path | None = None,
    listener: Listener | None = None,
) -> tuple[Parity, tuple[float, float]]:
    """Judge a copy of a bundle whose matrices are rounded as engines for TensorRT-RTX will round them.

    Args:
        bundle: the bundle, in fp16 or bf16.
        copy: the folder of the copy.
        precision: int8, fp8 or int4, a precision of the ladder.
        text, tokens: real text, or its token ids, for gates on the distribution and the perplexity.
        listener: receives progress and warnings.

    Returns:
        The parity result, and the self-test's largest differences: of log-probabilities and memory, or of outputs and
        state.

    Raises:
        UsageError: real text is given to a model that reads no token ids, or it cannot be read.
        CheckError: a gate failed, or the self-test differs by more than an engine's sidecar may state.
    """
    listener, manifest = listener or Silent(), bundle.manifest
    entry = manifest.tokens
    if entry is None and (text is not None or tokens is not None):
        raise UsageError(f"{bundle.path}: reads no token ids, and --text or --tokens is given; leave it out")
    ids = None if entry is None else read_tokens(text, tokens, bundle.vocabulary(), manifest.vocab_size)
    with runnable(copy, manifest, "cpu") as folder, runnable(bundle.path, manifest, "cpu") as original:
        opened = partial(opened_for_rtx, openers(folder, manifest, "cpu")[0], precision)
        if manifest.family_name == "transformer_xl":
            weights = weights_of_bundle(bundle.file(manifest.weights), manifest)
            reference = reference_for(manifest.config, manifest.dialect, manifest.memory_length, weights)
            parity = verify_models(manifest, [opened], reference, "the bundle's own weights", ids, None, listener)
        else:
            samples = None if ids is None or entry is None else {entry.name: ids[None] if entry.axes.positions else ids}
            itself = BundleReference(load(original, "cpu"))
            parity = verify_model(opened, itself, "the bundle as it is", samples, listener=listener, odd=False)
        replace(parity, advice=f"the matrices do not bear {precision}; build without --precision").require()
        outputs, state, *_ = run_selftest(opened(), manifest.precision).largest.values()
    if not (outputs <= MOST_REACHED[0] and state <= MOST_REACHED[1]):
        raise CheckError(
            f"{bundle.path}: with matrices in {precision} the self-test differs by {outputs:.2g} and {state:.2g}, "
            f"expected at most {MOST_REACHED[0]} and {MOST_REACHED[1]} of outputs and state; build without --precision"
        )
    return parity, (outputs, state)


def _refuse(path: object, options: Mapping[str, object]) -> None:
    """Refuse options that do not apply to an ONNX file."""
    if wrong := [f"--{name}" for name, value in options.items() if value is not None]:
        raise UsageError(f"{path}: is an ONNX file, which has no use for {some(wrong)}; leave it out")


def _file_options(
    inputs: str | Path | None, states: Mapping[str, str] | None, rename: Mapping[str, str] | None
) -> FileOptions:
    return FileOptions(rename or {}, states or {}, {} if inputs is None else read_samples(Path(inputs)))


def _made_of(path: Path, manifest: Manifest) -> bool:
    """Return whether the bundle was made from exactly this file: whether its manifest names the file's SHA-256."""
    with contextlib.suppress(OSError, CheckpointError):  # the file's later reader reports why it cannot be read
        return manifest.family.get("sha256") == hashlib.sha256(read_regular(path, MOST_BYTES)).hexdigest()
    return False


def bisect(bundle: str | Path, checkpoint: str | Path | None = None, backend: str = "auto") -> Bisection:
    """Find the first layer of a bundle that differs from the reference, or of an engine from ONNX Runtime.

    Args:
        bundle: the bundle's folder.
        checkpoint: the file that the bundle was exported from. Without it the reference has the bundle's own weights,
            so a wrong weight goes unnoticed.
        backend: "rtx" or "tensorrt" compares the engine with ONNX Runtime; else ONNX Runtime with the reference.

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
