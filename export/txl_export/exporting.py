"""The export: checkpoint → canonical model → graphs → bundle, verified before it gets its name."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, Protocol, cast, get_type_hints

import msgspec
import numpy as np
import txl_runtime
from torch import Tensor
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import REPORT, SELFTEST
from txl_runtime.bundle.tables import Precision
from txl_runtime.bundle.vocabulary import decode_vocabulary
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.selftest import SelftestResult, run_selftest
from txl_runtime.types import Ids

from txl_export.bundle.placing import check_destination, publishing
from txl_export.bundle.sealing import seal
from txl_export.checkpoints import Source, read_checkpoint, read_config
from txl_export.checkpoints.overrides import ask_overrides
from txl_export.checkpoints.vocabularies import read_vocabulary_file
from txl_export.families.transformer_xl.building import Builder
from txl_export.families.transformer_xl.folding import HALF
from txl_export.families.transformer_xl.settings import memory_form, resolve
from txl_export.families.transformer_xl.weights import check_weights
from txl_export.graphs.emulation import EMULATED, runnable
from txl_export.options import ExportOptions, flags_of_export
from txl_export.parity.report import Parity
from txl_export.parity.vectors import selftest_vectors
from txl_export.parity.verification import openers, verify_models
from txl_export.token_files import read_tokens

VOCABULARY = "vocabulary.json"
Checkpoint = str | Path | Mapping[str, Tensor]
Options = ParamSpec("Options")


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


class _Export(Protocol[Options]):
    def __call__(
        self, checkpoint_or_state: Checkpoint, out: str | Path, *positional: Options.args, **named: Options.kwargs
    ) -> ExportResult: ...


def _taking(options: Callable[Options, ExportOptions]) -> _Export[Options]:
    """`export`, with the fields of the options as its keyword arguments: so they stand in one place, with types."""

    def export(
        checkpoint_or_state: Checkpoint, out: str | Path, *positional: Options.args, **named: Options.kwargs
    ) -> ExportResult:
        """Turn a trained Transformer-XL into a verified bundle.

        Args:
            checkpoint_or_state: a checkpoint file, or a state dict in memory (which needs `config`).
            out: the bundle's folder; nothing stands under this name until everything has passed.
            positional: none; what follows are the fields of `txl_export.ExportOptions`, by name.
            named: the options:

        Raises:
            TxlError: the checkpoint, an option or the place is not usable; CheckError when a parity gate fails.
                Nothing is left under `out` in that case.
        """
        return _export(checkpoint_or_state, Path(out), options(*positional, **named))

    types, flags = get_type_hints(options), flags_of_export()
    first, second, *_ = inspect.signature(export).parameters.values()
    fields = [field.replace(annotation=types[name]) for name, field in inspect.signature(options).parameters.items()]
    vars(export)["__signature__"] = inspect.Signature((first, second, *fields), return_annotation=ExportResult)
    told = "".join(f"\n                {name}: {flag.help}" for name, flag in flags.items())
    export.__doc__ = (export.__doc__ or "").replace("the options:", f"the options:{told}")
    return export


export = _taking(ExportOptions)


def _export(checkpoint: Checkpoint, target: Path, options: ExportOptions) -> ExportResult:
    heard = options.listener or Silent()
    check_destination(target, options.force)
    if not isinstance(checkpoint, str | PathLike | Mapping):
        raise UsageError(f"the checkpoint is {type(checkpoint).__name__}, expected a path or a state dict")
    config = read_config(Path(options.config)) if isinstance(options.config, str | Path) else options.config
    overrides = ask_overrides(options.initial_memory, options.cluster_order, options.embedding_scale)

    heard.stage("read the checkpoint")
    imported, source = read_checkpoint(checkpoint, options.family, config, options.aliases, overrides)
    if options.vocabulary is not None:
        imported = replace(imported, vocabulary=read_vocabulary_file(Path(options.vocabulary)))
    weights = check_weights(imported.config, imported.weights, source.name)
    dialect, sizes, lines = resolve(imported, options)
    for line in (*imported.notes, *lines):
        heard.warn(line)
    if min(sizes.segment_lengths) > 1:
        heard.warn("no segment length of 1: generating will run a whole segment for every token")
    words = None
    if imported.vocabulary:
        words = decode_vocabulary(
            imported.vocabulary, imported.config.vocab_size, str(options.vocabulary or source.name)
        )
    text = read_tokens(options.text, options.tokens, words, imported.config.vocab_size)
    form = memory_form(imported.config, sizes, options, heard)
    precision = cast(Precision, options.precision)
    builder = Builder(imported.config, dialect, sizes, weights, form, precision, options.keep)

    with publishing(target, options.force) as folder:
        programs, quantised = builder.write(folder, heard)
        if imported.vocabulary:
            (folder / VOCABULARY).write_bytes(imported.vocabulary)
        manifest = builder.manifest(programs, VOCABULARY if imported.vocabulary else None)
        provenance = _provenance(source, config, options.aliases)
        manifest = _add_selftest(builder, folder, msgspec.structs.replace(manifest, provenance=provenance), heard)
        parity = None
        if options.verify:
            parity = _verify(builder, folder, manifest, text, heard)
            if quantised:
                sensitivity, gain = builder.quantisation(quantised, text, heard)
                parity = replace(parity, sensitivity=sensitivity).with_gain(gain)
            (folder / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(parity.document())))
            parity.require()
            manifest = msgspec.structs.replace(manifest, parity=parity.summary())
        manifest = seal(folder, manifest)
        heard.stage("self-test")
        _selftest(folder, manifest).require()
    return ExportResult(target, manifest, parity)


def _add_selftest(builder: Builder, folder: Path, manifest: Manifest, heard: Listener) -> Manifest:
    """Write the self-test's vectors; below float32 with how far the bundle is from them here."""
    heard.stage("compute self-test vectors")
    vectors = selftest_vectors(manifest, builder.reference())
    np.savez_compressed(folder / SELFTEST, allow_pickle=False, **vectors)
    manifest = seal(folder, manifest)
    if manifest.precision != "fp32":
        reached = _selftest(folder, manifest)
        vectors["reached"] = np.array([reached.max_logprobs, reached.max_memory])
        np.savez_compressed(folder / SELFTEST, allow_pickle=False, **vectors)
        manifest = seal(folder, manifest)
    return manifest


def _selftest(folder: Path, manifest: Manifest) -> SelftestResult:
    with runnable(folder, manifest, "cpu") as runs:
        return run_selftest(txl_runtime.load(runs, "cpu"))


def _verify(builder: Builder, folder: Path, manifest: Manifest, text: Ids | None, heard: Listener) -> Parity:
    precision = manifest.precision
    if precision in HALF:
        heard.warn(f"{precision} on the CPU is indicative: verify again on the device that the bundle is for")
    with runnable(folder, manifest, "cpu") as runs:
        ways, stand_in = openers(runs, manifest, "cpu"), precision if precision == EMULATED else None
        return verify_models(ways, builder.reference(), "the checkpoint", text, None, heard, stand_in_for=stand_in)


def _provenance(source: Source, config: Mapping[str, Any] | None, aliases: Mapping[str, str] | None) -> dict[str, Any]:
    packages = ("txl-deploy", "torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy", "safetensors")
    return {
        "source": msgspec.to_builtins(source),
        "config": dict(config) if config is not None else None,
        "aliases": dict(aliases) if aliases else None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
