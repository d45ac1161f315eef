"""Read the verifications and the measurement that a page shows, from the bundle or from files that commands wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import REPORT, Bundle
from txl_runtime.errors import BundleError, UsageError

from txl_report.facts.plain import Missing
from txl_report.schema.measurement import Measurement, check_measurement, decode_measurement
from txl_report.schema.reading import check_size, read_document, short
from txl_report.schema.verification import Verification, check_verification, decode_verification

T = TypeVar("T", Verification, Measurement)


def verification_of_bundle(bundle: Bundle) -> Verification | Missing:
    """Return the verification that the export made, or the reason why there is none."""
    again = "txl-deploy verify BUNDLE"
    record, manifest = bundle.manifest.files.get(REPORT), bundle.manifest
    if record is None:
        return Missing("The bundle was exported without a verification (--no-verify).")
    try:
        check_size(record.size)
        verification = decode_verification(bundle.read(REPORT))
        if _other(verification, manifest):
            return Missing(f"{REPORT} is of another model or another precision than the bundle.", again)
        check_verification(verification)
    except (BundleError, ValueError) as error:
        return Missing(f"{REPORT} cannot be read: {error}.", again)
    return verification


def verification_of_file(path: Path, bundle: Bundle) -> Verification:
    """Read a verification of this bundle that `verify --json` wrote.

    Raises:
        UsageError: the file is not a verification, contradicts itself, or is of a different model or precision.
    """
    return _of_file(path, bundle, "verify", "verification", decode_verification, check_verification)


def measurement_of_file(path: Path, bundle: Bundle) -> Measurement:
    """Read a measurement of this bundle that `bench --json` wrote.

    Raises:
        UsageError: the file is not a measurement, contradicts itself, or is of a different model or precision.
    """
    return _of_file(path, bundle, "bench", "measurement", decode_measurement, check_measurement)


def _of_file(
    path: Path,
    bundle: Bundle,
    command: str,
    noun: str,
    decode: Callable[[bytes], T],
    check: Callable[[T], None],
) -> T:
    """Read a document about this bundle that a command wrote; `noun` is the document's name in messages."""
    expected = (
        f"expected what `txl-deploy {command} --json` writes; "
        f"write one with: txl-deploy {command} BUNDLE --json > {command}.json"
    )
    try:
        document = decode(read_document(path))
        other = _other(document, bundle.manifest)
        if not other:
            check(document)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}, {expected}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}, {expected}") from None
    if other:
        raise UsageError(f"{path}: {other}; give a {noun} of this bundle")
    return document


def _other(document: Verification | Measurement, manifest: Manifest) -> str:
    """Return how a document's model or precision differs from the bundle's, or ""; old documents name no model."""
    if document.model_id and document.model_id != manifest.model_id:
        return f"is of model {document.model_id[:12]}, the bundle is of {manifest.model_id[:12]}"
    if document.precision != manifest.precision:
        return f"is of {short(document.precision, 40)}, the bundle is {manifest.precision}"
    return ""
