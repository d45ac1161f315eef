"""Writing the page: as a whole or not at all, never into a bundle, with what was asked to be measured."""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from frozen import frozen
from report_pages import Page
from step_models import recurrent
from txl_export.families.registry import facts_of_bundle
from txl_report import rendering, write_report, writing
from txl_report.calibration import record
from txl_report.writing import ids_of_text
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.installing import pip_line
from txl_runtime.listener import Silent


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bundle, written by hand."""
    return recurrent().write(tmp_path_factory.mktemp("bundles") / "step.txl")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_page_is_written_and_says_what_it_has(step: Path, tmp_path: Path):
    written = write_report(step, tmp_path / "page.html", describe=facts_of_bundle)
    assert names(tmp_path) == ["page.html"]
    assert written.bytes == (tmp_path / "page.html").stat().st_size
    sections = {section.name: section for section in written.sections}
    assert sections["model"].present
    assert not sections["speed"].present
    assert sections["speed"].missing
    Page((tmp_path / "page.html").read_text())


def test_a_file_is_replaced_only_by_force(step: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(UsageError, match="exists already, expected a free name; add --force"):
        write_report(step, page)
    assert page.read_text() == "mine"
    write_report(step, page, force=True)
    assert "Model report" in page.read_text()


@pytest.mark.parametrize("inner", ["page.html", "engines/page.html"])
def test_never_into_a_bundle(step: Path, tmp_path: Path, inner: str):
    bundle = recurrent().write(tmp_path / "step.txl")
    (bundle / "engines").mkdir()
    (tmp_path / "link").symlink_to(bundle)
    (tmp_path / "page.html").symlink_to(bundle / inner)
    before = names(bundle)
    for out in (bundle / inner, tmp_path / "link" / inner, tmp_path / "page.html", bundle / ".." / "step.txl" / inner):
        with pytest.raises(UsageError, match="lies in the bundle"):
            write_report(step, out, force=True)
    assert names(bundle) == before


def test_beside_somebody_else_s_manifest_is_no_bundle(step: Path, tmp_path: Path):
    (tmp_path / "manifest.json").write_text('{"name": "an extension"}')
    write_report(step, tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("place", ["missing/page.html", "folder", "pipe"])
def test_places_where_no_page_can_go_are_refused_before_any_work(step: Path, tmp_path: Path, place: str):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    with pytest.raises(UsageError, match=r"choose another place|give another -o"):
        write_report(tmp_path / "no bundle", tmp_path / place, force=True)
    assert names(tmp_path) == before


def test_a_full_disk_leaves_nothing(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TxlError, match="the disk is full"):
        write_report(step, tmp_path / "page.html")
    assert names(tmp_path) == []


def test_what_is_no_bundle_is_refused(tmp_path: Path):
    with pytest.raises(BundleError, match="expected"):
        write_report(tmp_path, tmp_path / "page.html")
    assert names(tmp_path) == []


def test_options_that_need_a_text_say_so(step: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="--context measures on a text, and none was given"):
        write_report(step, tmp_path / "page.html", context=True)
    with pytest.raises(UsageError, match="no token ids to read text with; leave --text out"):
        write_report(step, tmp_path / "page.html", text=tmp_path / "text.txt")
    with pytest.raises(UsageError, match="expected one of them"):
        write_report(step, tmp_path / "page.html", text=tmp_path / "text.txt", ids=np.zeros(3, np.int32))
    assert names(tmp_path) == []


def test_without_jinja2_there_is_a_sentence(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendering, "find_spec", lambda _: None)
    with pytest.raises(
        BackendError, match=re.escape(f"a report needs jinja2, not installed here; {pip_line('report')}")
    ):
        write_report(step, tmp_path / "page.html")


def test_losses_are_measured_on_a_text(tmp_path: Path):
    ids = np.random.default_rng(0).integers(0, 41, 400).astype(np.int32)
    written = write_report(frozen("0.8/clusters"), tmp_path / "page.html", ids=ids, source="<ids>")
    assert {section.name for section in written.sections if section.present} >= {"model", "same", "memory", "context"}
    page = (tmp_path / "page.html").read_text()
    assert "&lt;ids&gt;" in page
    assert "memory rows that may be filled" in page


@pytest.mark.slow
def test_a_slow_machine_changes_no_byte_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page is written twice, the second time with a clock that goes 100 seconds forward at each look."""
    bundle = frozen("clusters")
    ids = np.random.default_rng(0).integers(0, 256, 1_100).astype(np.int32)
    write_report(bundle, tmp_path / "fast.html", ids=ids, context=True)
    monkeypatch.setattr(time, "monotonic", itertools.count(0, 100).__next__)
    write_report(bundle, tmp_path / "slow.html", ids=ids, context=True)
    assert (tmp_path / "fast.html").read_bytes() == (tmp_path / "slow.html").read_bytes()


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (286, ", behind the 30 tokens that int4 is fitted to"),
        (30, "; int4 is fitted to 30 tokens, and this text begins with them"),
        (29, "; int4 is fitted to 30 tokens, and this text may hold some"),
    ],
)
def test_the_source_says_which_tokens_int4_is_fitted_to(monkeypatch: pytest.MonkeyPatch, count: int, said: str):
    monkeypatch.setattr("txl_report.measuring.measure_text", lambda model, ids, listener: None)
    ids = np.arange(count, dtype=np.int32)
    found = open_bundle(frozen("ring")).manifest
    noted = {**found.provenance, "calibration": record(np.arange(30, dtype=np.int32))}
    model = SimpleNamespace(manifest=msgspec.structs.replace(found, precision="int4", provenance=noted))
    assert writing.measure(model, ids, "a.txt", context=False, listener=Silent()).source == f"a.txt{said}"


def test_of_a_long_text_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bundle = open_bundle(frozen("clusters"))
    text = tmp_path / "long.txt"
    text.write_bytes(b"first\nsecond\nthird")
    assert ids_of_text(bundle, text)[1] == "long.txt"
    monkeypatch.setattr(writing, "MOST_TEXT", 14)  # a byte into the third line
    ids, name = ids_of_text(bundle, text)
    assert (bytes(ids.astype(np.uint8)), name) == (b"first\nsecond\n", "long.txt, its first 13 bytes")
    with text.open("wb") as opened:
        opened.truncate(1 << 40)  # who reads this whole never comes back
    assert len(ids_of_text(bundle, text)[0]) == 14


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "/proc/kmsg"])
def test_what_is_no_plain_file_is_not_waited_for(step: Path, tmp_path: Path, kind: str):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    if not os.access(tmp_path / kind, os.R_OK):
        pytest.skip(f"{kind} is not there, or not ours to read")
    bundle = frozen("clusters")
    before = names(tmp_path)
    for option in ("bench", "verify"):
        with pytest.raises(UsageError, match=f"expected what `txl-deploy {option} --json` writes"):
            write_report(step, tmp_path / "page.html", **{option: tmp_path / kind})
    if kind != "/proc/kmsg":  # looks like an empty text
        with pytest.raises(UsageError, match="expected a text file; check --text"):
            write_report(bundle, tmp_path / "page.html", text=tmp_path / kind)
    assert names(tmp_path) == before


# ---- the page in a bundle


def test_an_export_has_its_page(make_bundle: Callable[..., Path]):
    bundle = make_bundle()
    manifest = open_bundle(bundle).manifest  # holds every file against its hash
    assert "report.html" in manifest.files
    read = Page((bundle / "report.html").read_text())
    assert "small.txl" in read.alone["html head title"]
    assert "Verified: the same model" in read.text
    assert manifest.model_id in read.text


@pytest.mark.parametrize("error", [BackendError("no jinja2"), ValueError("wrong"), NameError("missing")])
def test_an_export_does_not_fail_for_its_page(
    tmp_path: Path, step: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    from txl_export import reporting
    from txl_export.options import ExportOptions
    from txl_runtime.listener import Silent

    heard: list[str] = []

    class Listening(Silent):
        def warn(self, message: str) -> None:
            heard.append(message)

    def fails(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(reporting, "page_for_export", fails)
    assert not reporting.add_page(step, "step.txl", ExportOptions(), Listening())
    assert "the bundle has no report.html" in heard[0]
    assert not (step / "report.html").exists()
