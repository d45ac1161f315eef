"""Exports a model of any family: writes weights and graphs, verifies them, and only then names the bundle."""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ParamSpec, Protocol, get_type_hints

import msgspec
import numpy as np
import txl_runtime
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor
from txl_runtime.bundle.encoding import utf8
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import REPORT, SELFTEST, open_bundle
from txl_runtime.bundle.tables import STATE_DTYPES
from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.ladder import explained
from txl_runtime.listener import Listener, Silent
from txl_runtime.selftest import SelftestResult, run_selftest

from txl_export.bundle.placing import check_destination, publishing
from txl_export.bundle.sealing import seal
from txl_export.checkpoints.vocabularies import boundary_of, differences
from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.sources import found_source
from txl_export.families.own_module.spec import StepSpec
from txl_export.families.registry import Prepared, family_of_source
from txl_export.graphs.emulation import runnable
from txl_export.options import ExportOptions, flags_of_export
from txl_export.proof.parity import AMPLIFIES, Parity
from txl_export.repeating import command_of
from txl_export.reporting import add_page

VOCABULARY = "vocabulary.json"
Source = str | Path | Mapping[str, Tensor] | StepSpec
Options = ParamSpec("Options")


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: the bundle's folder.
        manifest: the bundle's manifest.
        parity: the verification's result, None with verify=False.
    """

    path: Path
    manifest: Manifest
    parity: Parity | None

    def __repr__(self) -> str:
        """Return one line, because `manifest` and `parity` would print hundreds of lines."""
        return f"ExportResult({str(self.path)!r}: {self.verdict})"

    @property
    def verdict(self) -> str:
        """The result in words: "fp32, B 4, step-16, step-1; 11 gates passed"."""
        names = some([program.name for program in self.manifest.programs], 4)
        judged = () if self.parity is None else [gate for gate in self.parity.gates if gate.passed is not None]
        verified = f"{len(judged)} gates passed" if self.parity and self.parity.passed else "not verified"
        return f"{self.manifest.precision}, B {self.manifest.batch_size}, {names}; {verified}"


class _Export(Protocol[Options]):
    def __call__(
        self, checkpoint_or_state: Source, out: str | Path, *positional: Options.args, **named: Options.kwargs
    ) -> ExportResult: ...


def _taking(options: Callable[Options, ExportOptions]) -> _Export[Options]:
    """Return `export` with each field of the options as a keyword argument; names and types are written only once."""

    def export(
        checkpoint_or_state: Source, out: str | Path, *positional: Options.args, **named: Options.kwargs
    ) -> ExportResult:
        """Turn a trained model into a verified bundle. Without a `listener`, print the verdict on standard error.

        Args:
            checkpoint_or_state: a Transformer-XL's checkpoint file, or its state dict in memory (which needs `config`);
                or any other step with state: a `StepSpec`, or "FILE.py:FUNCTION" whose function returns one, or an ONNX
                file; or with `adapter` the checkpoint or state dict of a package's model.
            out: the bundle's folder; it does not exist until everything has passed.
            positional: not used; the fields of `txl_export.ExportOptions` are given by name.
            named: the options:

        Raises:
            TxlError: the checkpoint, an option or `out` is not usable; CheckError if a parity gate fails.
                After an error no new bundle is left at `out`.
        """
        return _export(checkpoint_or_state, Path(out), options(*positional, **named))

    types, flags = get_type_hints(options), flags_of_export()
    first, second, *_ = inspect.signature(export).parameters.values()
    fields = [field.replace(annotation=types[name]) for name, field in inspect.signature(options).parameters.items()]
    vars(export)["__signature__"] = inspect.Signature((first, second, *fields), return_annotation=ExportResult)
    described = "".join(f"\n                {name}: {flag.help}" for name, flag in flags.items())
    export.__doc__ = (export.__doc__ or "").replace("the options:", f"the options:{described}")
    return export


export = _taking(ExportOptions)


def _export(source: Source, target: Path, options: ExportOptions) -> ExportResult:
    listener = options.listener or Silent()
    check_destination(target, options.force)
    chosen = found_source(source) if options.adapter is None else _adapted(options.adapter, source, options)
    prepared = family_of_source(chosen).prepare(chosen, options, listener)
    with publishing(target, options.force) as folder:
        manifest = prepared.write(folder, listener)
        if prepared.vocabulary:
            (folder / VOCABULARY).write_bytes(prepared.vocabulary)
        manifest = msgspec.structs.replace(
            manifest,
            vocabulary=VOCABULARY if prepared.vocabulary else None,
            boundary_token=_boundary(options.boundary_token, prepared.vocabulary, manifest.vocab_size),
            provenance=utf8({**prepared.provenance, "command": command_of(source, options), "versions": _versions()}),
        )
        manifest = _add_selftest(prepared, folder, manifest, listener)
        parity = None
        if options.verify:
            parity = prepared.verify(folder, manifest, listener)
            if prepared.vocabulary:
                parity = parity.with_words(differences(open_bundle(folder), prepared.vocabulary, "export", Silent()))
            (folder / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(parity.document())))
            parity.require()
            manifest = msgspec.structs.replace(manifest, parity=parity.summary())
        manifest = seal(folder, manifest)
        if add_page(folder, target.name, options, listener):
            manifest = seal(folder, manifest)
        listener.stage("self-test")
        _require(_selftest(folder, manifest), folder)
    result = ExportResult(target, manifest, parity)
    if options.listener is None:
        print(f"{target}: {result.verdict}", file=sys.stderr)  # noqa: T201 - a script's only sign of how it ended
    return result


def _adapted(name: str, source: Source, options: ExportOptions) -> Adapted:
    if not isinstance(source, str | Path | Mapping):
        raise UsageError(
            f"adapter is given beside a {type(source).__name__}, expected a package's checkpoint or state dict; leave "
            "it out"
        )
    if options.weights is not None:
        raise UsageError("weights are given beside an adapter's checkpoint, which are its weights; leave them out")
    return Adapted(name, source, options.config)


def _boundary(token: int | None, vocabulary: bytes | None, vocab_size: int) -> int | None:
    """Return the id that separates texts: the given token, else the vocabulary's boundary.

    Raises:
        UsageError: the given token is not an id of the model.
    """
    if token is None:
        return boundary_of(vocabulary, vocab_size) if vocabulary and vocab_size else None
    if token >= vocab_size:
        has = f"an id of 0 … {vocab_size - 1}" if vocab_size else "none, because the model reads no token ids"
        raise UsageError(f"boundary_token is {token}, expected {has}; check --boundary-token")
    return int(token)


def _add_selftest(prepared: Prepared, folder: Path, manifest: Manifest, listener: Listener) -> Manifest:
    """Write the self-test's vectors; below fp32 also the bundle's largest errors on this machine ("reached")."""
    listener.stage("compute self-test vectors")
    vectors = prepared.vectors(manifest)
    _store(vectors | {"reached": np.zeros(2)} if manifest.precision != "fp32" else vectors, folder)
    manifest = seal(folder, msgspec.structs.replace(manifest, selftest=SELFTEST))
    if manifest.precision != "fp32":
        result = _selftest(folder, manifest, rounding=True)
        if not _finite(result):
            sentence = (
                f"where {manifest.precision} is rounded after every operator, the self-test gives infinity, NaN or"
            )
            if result.rows:
                raise CheckError(f"{sentence} other numbers than the model; give --precision bf16 or fp32")
            # An integer output of a model that is no Transformer-XL may depend on the last bit: the export goes on.
            listener.warn(
                f"{sentence} other whole numbers: a device may fail it; where one does, give another --precision"
            )
            result = _selftest(folder, manifest)
        vectors["reached"] = np.array([*result.largest.values()])
        if manifest.precision in STATE_DTYPES:
            vectors |= {f"reached/{name}": errors.astype(np.float32) for name, errors in result.rows.items()}
        _store(vectors, folder)
        manifest = seal(folder, manifest)
    return manifest


def _store(vectors: Mapping[str, NDArray[Any]], folder: Path) -> None:
    """Write the vectors in C order, because safetensors writes an array's memory and ignores strides."""
    (folder / SELFTEST).write_bytes(save({name: np.asarray(values, order="C") for name, values in vectors.items()}))


def _finite(result: SelftestResult) -> bool:
    return all(np.isfinite(errors).all() for errors in (np.array([*result.largest.values()]), *result.rows.values()))


def _selftest(folder: Path, manifest: Manifest, rounding: bool = False) -> SelftestResult:
    with runnable(folder, manifest, "cpu", rounding) as runs:
        return run_selftest(txl_runtime.load(runs, "cpu"), manifest.precision)


def _require(result: SelftestResult, folder: Path) -> None:
    """Raise CheckError unless the self-test passed; the message names the model's own rounding if it explains all.

    The own rounding is the model's difference between float32 and float64; large, the vectors hold it as "rounding".
    """
    beyond = [(value, result.limits[name]) for name, value in result.largest.items() if value > result.limits[name]]
    own = 0.0 if result.passed else float(open_bundle(folder).selftest().get("rounding", 0.0))
    if own and all(value <= explained(own) for value, _ in beyond):
        value, limit = max(beyond, key=lambda one: one[0] / one[1])
        raise CheckError(
            f"the self-test cannot judge this model: the bundle is {value:.0e} from it (limit {limit:.0e}), and so is "
            f"the model from itself, {own:.0e}, between float32 and float64 in the same segments; {AMPLIFIES}"
        )
    result.require()


def _versions() -> dict[str, str | None]:
    packages = ("txl-deploy", "torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy", "safetensors")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
