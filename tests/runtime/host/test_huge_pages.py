"""Large pages: contents stay, nothing else is touched, and nothing happens where they are not wanted."""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import load
from txl_runtime.host import huge_pages
from txl_runtime.host.huge_pages import in_huge_pages

MB = 2**20


def mapped(megabytes: int, filled: int | None = None) -> mmap.mmap:
    """Private memory in small pages: of the first `filled` MB all is written, of each later one a page."""
    block = mmap.mmap(-1, megabytes * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_NOHUGEPAGE)
    whole = (megabytes if filled is None else filled) * MB
    for place in (*range(0, whole, mmap.PAGESIZE), *range(whole, megabytes * MB, MB)):
        block[place : place + 8] = place.to_bytes(8, "little")
    block.madvise(mmap.MADV_HUGEPAGE)
    return block


def kilobytes(block: mmap.mmap, field: str) -> int:
    """A field of the mappings that a block lies in, such as AnonHugePages."""
    start, total, inside = ctypes.addressof(ctypes.c_char.from_buffer(block)), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low < start + len(block) and high > start
        elif inside and first == f"{field}:":
            total += int(rest[0])
    return total


@pytest.fixture
def pages():
    """Skips where this system has no large pages."""
    if not huge_pages.SETTINGS.exists() or "[never]" in (huge_pages.SETTINGS / "enabled").read_text():
        pytest.skip("this system has no large pages, or does not want them")
    block = mapped(4)
    start = -(-ctypes.addressof(ctypes.c_char.from_buffer(block)) // (2 * MB)) * 2 * MB
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 * MB), huge_pages.COLLAPSE):
        pytest.skip("this kernel puts no memory into large pages of 2 MB on request")


@pytest.mark.usefixtures("pages")
def test_new_memory_lies_in_large_pages_and_keeps_its_contents(caplog):
    old = mapped(40)
    caplog.set_level(logging.INFO, logger="txl_runtime")
    with in_huge_pages():
        block = mapped(40)
    assert kilobytes(block, "AnonHugePages") >= 34 * 1024
    assert not kilobytes(old, "AnonHugePages"), "memory from before is not touched"
    for place in range(0, 40 * MB, mmap.PAGESIZE):
        assert block[place : place + 8] == place.to_bytes(8, "little")
    assert "MB into large pages" in caplog.text


@pytest.mark.usefixtures("pages")
def test_memory_that_is_not_filled_is_not_filled():
    with in_huge_pages():
        block = mapped(80, filled=40)
    assert kilobytes(block, "Rss") <= 44 * 1024
    assert kilobytes(block, "AnonHugePages") >= 34 * 1024


@pytest.mark.usefixtures("pages")
def test_a_small_model_stays_as_it_is():
    with in_huge_pages():
        block = mapped(20)
    assert not kilobytes(block, "AnonHugePages")


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("content", [None, "always madvise [never]"])
def test_nothing_happens_where_they_are_not_wanted(monkeypatch, tmp_path, content):
    if content is not None:
        (tmp_path / "enabled").write_text(content)
        (tmp_path / "hpage_pmd_size").write_text("2097152")
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    with in_huge_pages():
        block = mapped(40)
    assert not kilobytes(block, "AnonHugePages")


def test_nothing_happens_where_the_process_cannot_look_at_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "PROCESS", tmp_path)
    with in_huge_pages():
        pass


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("missing", ["pagemap", "both"])
def test_nothing_happens_where_the_process_may_not_look_at_its_pages_any_more(monkeypatch, tmp_path, missing):
    with in_huge_pages():
        block = mapped(40)
        if missing == "pagemap":
            (tmp_path / "maps").write_bytes(Path("/proc/self/maps").read_bytes())
        monkeypatch.setattr(huge_pages, "PROCESS", tmp_path)
    assert not kilobytes(block, "AnonHugePages")


def test_files_may_have_any_name(monkeypatch, tmp_path):
    lines = b"1000-3000 rw-p 00000000 00:00 0 \n4000-5000 r--p 0 08:01 7 /a\rb c\n6000-7000 rw-p 0 00:00 0   [heap]\n"
    (tmp_path / "maps").write_bytes(
        lines + b"8000-9000 rw-p 0 00:00 0   [stack]\na000-b000 rw-p 0 08:01 7 /a\r[heap]\n"
    )
    monkeypatch.setattr(huge_pages, "PROCESS", tmp_path)
    assert huge_pages._anonymous() == [(0x1000, 0x3000), (0x6000, 0x7000)]


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ([], [(0, 8)], [(0, 8)]),
        ([(0, 8)], [(0, 8)], []),
        ([(4, 8)], [(0, 12)], [(0, 4), (8, 12)]),
        ([(0, 4), (6, 8)], [(0, 12)], [(8, 12)]),  # the gap of 2 is below the size
        ([(0, 8)], [(4, 6), (8, 12)], [(8, 12)]),
        ([(0, 3), (20, 30)], [(10, 25)], [(10, 20)]),
        ([(0, 30)], [(0, 4), (8, 40)], [(30, 40)]),
    ],
)
def test_what_is_new_among_mappings(before, after, new):
    assert huge_pages._new(before, after, 4) == new


@pytest.mark.usefixtures("pages")
def test_a_model_computes_the_same_bits_and_may_do_without(monkeypatch, caplog):
    monkeypatch.setattr(huge_pages, "LEAST", 0)
    caplog.set_level(logging.INFO, logger="txl_runtime")
    path = frozen("ring")
    with_them = load(path, "cpu", threads=1)
    told = [record for record in caplog.records if record.name.endswith("huge_pages")]
    caplog.clear()
    without, lean = load(path, "cpu", threads=1, huge_pages=False), load(path, "cpu", threads=1, lean=True)
    assert not [record for record in caplog.records if record.name.endswith("huge_pages")]
    assert told
    tokens = np.arange(30, dtype=np.int32)[None] % with_them.vocab_size
    found = [model.stream(1).feed(tokens) for model in (with_them, without)]
    np.testing.assert_array_equal(*found, strict=True)
    assert lean.stream(1).feed(tokens).shape == found[0].shape
