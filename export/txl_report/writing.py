"""Make the page of a bundle and write it: completely or not at all, and never into a bundle."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from txl_runtime.bundle.manifest import FORMAT, Manifest
from txl_runtime.bundle.reading import MANIFEST, Bundle, open_bundle
from txl_runtime.bundle.writing import plain_place, write_named
from txl_runtime.errors import TxlError, UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.types import Ids

from txl_report.calibration import begins_with_fitted, fitted, unfitted
from txl_report.facts.gathering import gather
from txl_report.page import Measures, page_values
from txl_report.rendering import render, require_jinja
from txl_report.schema.reading import read_plain

if TYPE_CHECKING:
    from txl_runtime.model import Model

    from txl_report.measuring.datastore import Searched

MOST_TEXT = 4 << 20
"""Maximum number of bytes of a text that are read, 4 MiB: more than any measurement uses, and little memory."""
_MANIFEST_HEAD = 4096
"""Number of bytes at the beginning of a manifest.json in which the format's name is searched, to recognise a bundle."""

Describe = Callable[[Manifest], Mapping[str, str]]
"""A function that returns the family's facts about the architecture, e.g.
`txl_export.families.registry.facts_of_bundle`.
"""


@dataclass(frozen=True)
class SectionState:
    """A section of the page: its name, whether it has content, and a sentence for each part that it lacks."""

    name: str
    present: bool
    missing: tuple[str, ...]


@dataclass(frozen=True)
class WrittenPage:
    """A page that was written.

    Attributes:
        path: path of the file.
        bytes: size of the page.
        sections: states of the sections, in their order.
    """

    path: str
    bytes: int
    sections: tuple[SectionState, ...]


def write_report(
    bundle: Path,
    out: Path,
    *,
    text: Path | None = None,
    ids: Ids | None = None,
    source: str = "token ids",
    bench: Path | None = None,
    verify: Path | None = None,
    context: bool = False,
    datastore: Callable[[Model, Ids], Searched | None] | None = None,
    force: bool = False,
    describe: Describe | None = None,
    backend: str = "auto",
    when: str = "",
    listener: Listener | None = None,
) -> WrittenPage:
    """Make the page of a bundle and write it.

    Args:
        bundle: the folder.
        out: the file to write; it must not exist unless `force` is given, and must not be inside a bundle.
        text: a text file for the measurements, which the bundle's vocabulary encodes.
        ids: int32 [T], token ids for the measurements, instead of a text file.
        source: the name of the ids on the page.
        bench, verify: files that `txl-deploy bench --json` and `verify --json` wrote.
        context: also measure the length of context that the model uses, which takes longest.
        datastore: opens a store for the model and the text's ids, to measure with and without it; it may return None.
        force: replace an existing file.
        describe: a function that returns the family's facts; without it the page has only the manifest's tables.
        backend: the backend that runs the model for measurements.
        when: a time to note on the page; without it the same bundle and text give the same page.
        listener: receives stages.

    Raises:
        BackendError: jinja2 is missing.
        UsageError: the path `out`, an input file or the text cannot be used.
        BundleError: the bundle is damaged.
        TxlError: the page cannot be written; no part of it is left.
    """
    require_jinja()
    listener = listener or Silent()
    check_place(out, force)
    if text is not None and ids is not None:
        raise UsageError("both a text and token ids were given, expected one of them; leave one out")
    if context and text is None and ids is None:
        raise UsageError("--context measures on a text, and none was given; add --text FILE or --tokens FILE.npy")
    if datastore is not None and text is None and ids is None:
        raise UsageError("--datastore is measured on a text, and none was given; add --text FILE or --tokens FILE.npy")
    listener.stage("read the bundle")
    opened = open_bundle(bundle)
    facts = gather(opened, describe(opened.manifest) if describe else None, verify=verify, bench=bench)
    measured = None
    if text is not None:
        ids, source = ids_of_text(opened, text)
    if ids is not None:
        import txl_runtime

        model = txl_runtime.load(bundle, backend)
        searched = None if datastore is None else datastore(model, ids)
        measured = measure(model, ids, source, context=context, listener=listener, searched=searched)
    listener.stage("write the page")
    page = page_values(facts, measured, when)
    data = render(page).encode()
    check_place(out, force)  # checked again, because measuring takes time
    write_named(out, data)
    states = [
        SectionState(section.name, section.present, tuple(gap.why for gap in section.gaps)) for section in page.sections
    ]
    return WrittenPage(str(out), len(data), tuple(states))


def ids_of_text(bundle: Bundle, text: Path) -> tuple[Ids, str]:
    """Encode a text, or the first whole lines of a long one, as token ids int32 [T]; also return its name on the page.

    For example, a vocabulary of bytes encodes a file that holds "ab" as [97, 98].

    Raises:
        UsageError: the bundle has no vocabulary, or the file cannot be read.
    """
    vocabulary = bundle.vocabulary()
    if vocabulary is None:
        has = "no vocabulary" if bundle.manifest.vocab_size else "no token ids"
        advice = "give --tokens FILE.npy instead" if bundle.manifest.vocab_size else "leave --text out"
        raise UsageError(f"{text}: the bundle has {has} to read text with; {advice}")
    try:
        data = read_plain(text, MOST_TEXT + 1)
    except OSError as error:
        raise UsageError(f"{text}: {error.strerror}, expected a text file; check --text") from None
    if len(data) <= MOST_TEXT:
        return vocabulary.encode(data), text.name
    data = data[: data.rfind(b"\n", 0, MOST_TEXT) + 1 or MOST_TEXT]
    return vocabulary.encode(data), f"{text.name}, its first {len(data):,} bytes"


def measure(
    model: Model, ids: Ids, source: str, *, context: bool, listener: Listener, searched: Searched | None = None
) -> Measures:
    """Measure a model on a text: losses and, with `context`, the length of context that the model uses.

    The text is token ids int32 [T], e.g. [100000]. With `searched`, losses are also measured with a datastore.
    Tokens to which the bundle's matrices were fitted are left out, and `source` on the page says so.
    """
    from txl_report.measuring import measure_context, measure_datastore, measure_text

    ids, left_out = unfitted(model.manifest, ids)
    if left_out:
        source += f", behind the {left_out:,} tokens that int4 is fitted to"
    elif count := fitted(model.manifest):
        held = "this text begins with them" if begins_with_fitted(model.manifest, ids) else "this text may hold some"
        source += f"; int4 is fitted to {count:,} tokens, and {held}"
    return Measures(
        source,
        measure_text(model, ids, listener),
        measure_context(model, ids, listener) if context else None,
        None if searched is None else measure_datastore(model, ids, searched, listener),
    )


def page_for_export(
    bundle: Bundle, name: str, described: Mapping[str, str], measured: Callable[[], Measures] | None, listener: Listener
) -> bytes:
    """Make the page that goes into a bundle; if measuring fails, the page is shorter and the listener is warned.

    Args:
        bundle: a complete bundle, except for the page.
        name: the bundle's name on the page.
        described: the family's facts about the bundle.
        measured: a function that measures the bundle on the export's text; None if there was no text.

    Raises:
        BackendError: jinja2 is missing.
    """
    measures = None
    if measured is not None:
        try:
            measures = measured()
        except TxlError as error:
            listener.warn(f"the page in the bundle has no measurements: {error}")
    return render(page_values(gather(bundle, described, name=name), measures)).encode()


def check_place(out: Path, force: bool) -> None:
    """Refuse a path at which no page can be written, before any work is done.

    Raises:
        UsageError: a file exists and `force` is off, the path is no plain file, or it is inside a bundle.
        TxlError: the path cannot be looked up.
    """
    if not out.name:
        raise UsageError(f"{out}: not a name for a page, expected e.g. report.html; give another -o")
    try:
        place = plain_place(out)
        if not place.parent.is_dir():
            raise UsageError(
                f"{out}: there is no folder {place.parent} to write {place.name} into; create it or give another -o"
            )
        if around := next((folder for folder in place.parents if _is_bundle(folder)), None):
            raise UsageError(
                f"{out}: lies in the bundle {around}, which only export and build write into; give another -o"
            )
        if os.path.lexists(out) and not force:
            raise UsageError(
                f"{out}: exists already, expected a free name; add --force to replace it, or give another -o"
            )
    except OSError as error:
        raise TxlError(f"{out}: {error.strerror or error}; expected a place for a file; give another -o") from None


def _is_bundle(folder: Path) -> bool:
    """Return True if a folder's manifest.json is a bundle's manifest; other tools also use this file name."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(_MANIFEST_HEAD)
    except OSError:
        return False
