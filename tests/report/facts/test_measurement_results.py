"""Measurements of speed as facts: what `bench --json` writes of both kinds of models, and files that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frozen import frozen
from resealing import BASES, changed
from support import FIXTURES
from txl_report.blocks import Figure, Pairs, Paragraph
from txl_report.facts.results import measurement_of_file
from txl_report.schema.measurement import (
    Agreement,
    Conditions,
    Footprint,
    LoadTime,
    Machine,
    Measurement,
    Overhead,
    Percentiles,
    Row,
    decode_measurement,
)
from txl_report.sections.speed import speed_section
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.errors import UsageError

from txl_deploy.bench.floor import device_floor
from txl_deploy.bench_tables import document_of

MACHINE = Machine(
    cpu="A processor",
    cores=4,
    system="Linux x86_64",
    read_gb_per_second=12.5,
    read_measurements=(12.5,),
    read_method="reading",
    versions={"python": "3.11.7", "onnxruntime": "1.31.1"},
)


def timed(p50: float, **more: Any) -> dict[str, Any]:
    times = Percentiles(calls=9, p50=p50, p90=2 * p50, p99=3 * p50, best=p50)
    return {"description": "an engine", "ms": times, "rounds": (p50,), "restless": 0, "foreign": 0.01} | more


def work(task: str, length: int, name: str, p50: float, **more: Any) -> Row:
    rates = {"tokens_per_second": 1e3 / p50, "ratio": 1.0, "bytes_per_token": 10.0, "gb_per_second": 1.0}
    known = timed(p50, of_bandwidth=0.5) | rates | more
    return Row(task=task, segment_length=length, competitor=name, **known)


@pytest.fixture(scope="module")
def opened() -> Bundle:
    return open_bundle(BASES / "transformer_xl")


@pytest.fixture(scope="module")
def report(opened: Bundle) -> Measurement:
    rows = [work("decode", 1, "torch", 4.0), work("decode", 1, "bundle", 0.5), work("score", 8, "bundle", 2.0)]
    return Measurement(
        model_id=opened.manifest.model_id,
        precision="fp32",
        memory_form="kv",
        machine=MACHINE,
        conditions=Conditions(
            threads=2,
            batch_size=1,
            memory_length=8,
            memory_rows=(8,),
            rounds=5,
            slice_seconds=0.4,
            warm_up_calls=3,
            rest="at rest",
        ),
        rows=tuple(rows),
        floor={},
        agreement={},
        left_out={"torch-compile": "needs a compiler"},
        overhead=Overhead(in_step=20.0, without_engine=10.0, step=500.0, share=0.04),
        load=LoadTime(load=0.1, first_token=0.1, total=0.2, process=0.5, without_hashes=0.15, runs=3),
        memory=Footprint(before=1, peak=9_000_000, settled=8_000_000, private=1, high_water=1, weights=5, state=6),
    )


def read(tmp_path: Path, bundle: Bundle, document: Any) -> Measurement:
    path = tmp_path / "bench.json"
    path.write_bytes(document if isinstance(document, bytes) else msgspec.json.encode(document))
    return measurement_of_file(path, bundle)


def told(found: Measurement) -> dict[str, str]:
    """Return the page's words beside its charts."""
    blocks = speed_section("bundle", found, "bench.json").blocks
    return {name: text for block in blocks if isinstance(block, Pairs) for name, text in block.rows}


def charts(found: Measurement) -> list[Figure]:
    return [block for block in speed_section("bundle", found, "bench.json").blocks if isinstance(block, Figure)]


def cautions(found: Measurement) -> list[str]:
    return [block.text for block in speed_section("bundle", found).blocks if isinstance(block, Paragraph)]


def test_a_measurement_is_read_with_the_bundle_first_and_ratios_to_it(tmp_path, opened, report):
    found = read(tmp_path, opened, document_of(report))
    assert [(rows[0].task, rows[0].segment_length, rows[0].unit) for rows in found.works] == [
        ("decode", 1, "tokens"),
        ("score", 8, "tokens"),
    ]
    assert [(row.competitor, row.per_second) for row in found.works[0]] == [("bundle", 2000.0), ("torch", 250.0)]
    (decode, score) = charts(found)
    assert decode.title == "Decode, L 1: all log-probabilities after every token"
    assert score.title == "Score, L 8: the nats of every token of a segment"
    assert decode.table.columns[4].name == "Tokens/s"
    assert [(row[0], row[4], row[5]) for row in decode.table.rows] == [
        ("bundle", "2,000", "1.00 ×"),
        ("torch", "250", "8.00 ×"),
    ]
    said = told(found)
    assert said["Measured by"] == "txl-deploy bench, bench.json"
    assert said["torch-compile"] == "needs a compiler"
    assert said["Processor"] == "A processor, 4 cores"
    assert said["Versions"] == "python 3.11.7, onnxruntime 1.31.1"
    assert said["Threads"] == "2"
    assert said["Memory"] == "full: 8 of 8 rows"
    assert said["Python per step"].startswith("20.0 µs of 500")
    assert said["Peak memory"].startswith("9.0 MB, 8.0 MB after loading")
    assert cautions(found) == []


def test_the_floor_on_a_device_is_read_where_it_is_known(tmp_path, opened, report):
    floors = device_floor("copies", 100.0, 2 * 10**6, 5), device_floor("not known", None, 2 * 10**6, 5)
    found = read(tmp_path, opened, document_of(msgspec.structs.replace(report, device_floors=floors)))
    said = [text for name, text in told(found).items() if name.startswith("Floor")]
    assert said == ["20 µs for 2.0 MB (copies)"]


def test_a_busy_machine_is_told(tmp_path, opened, report):
    rows = (work("decode", 1, "bundle", 1.0, foreign=0.4, restless=2),)
    found = read(tmp_path, opened, document_of(msgspec.structs.replace(report, rows=rows)))
    assert [caution[:37] for caution in cautions(found)] == [
        "Caution: Other processes used up to 4",
        "Caution: Thread pools of others were ",
    ]


def test_steps_of_any_other_model_are_read(tmp_path: Path):
    document = decode_measurement((FIXTURES / "release_0_8" / "policy-16.bench.json").read_bytes())
    agreed = Agreement(segments=9, found={"action": 1e-7}, limit=1e-4, measure="max_abs", seconds=1.0)
    machine = msgspec.structs.replace(document.machine, read_gb_per_second=None, read_method="reading")
    changes = {"machine": machine, "agreement": {"torch": agreed}}
    found = read(tmp_path, open_bundle(frozen("policy-16")), msgspec.structs.replace(document, **changes))
    first, second = charts(found)
    assert (first.title, second.title) == tuple(f"Step, L {n}: all outputs of a segment" for n in (4, 1))
    assert first.table.columns[4].name == "Positions/s"
    said = told(found)
    assert said["Memory reads"] == "reading"
    assert said["Torch agrees"] == "action 1e-07, 9 segments (max_abs limit 0.0001)"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("rows", [], r"\$\.rows"),
        ("rows.1.competitor", "other", "'decode' of L 1 has 0 rows of the bundle"),
        ("rows.0.competitor", "bundle", "'decode' of L 1 has 2 rows of the bundle"),
        ("rows.0.tokens_per_second", None, "a row of 'torch' has no rate"),
        ("rows.0.ms.p50", 0, "p50"),
        ("rows.0.ms.p90", 0.1, "percentiles of 'torch' are not in order"),
        ("rows.0.foreign", 2, "foreign"),
        ("machine.cores", -1, "cores"),
        ("conditions.threads", "two", "threads"),
        ("overhead.step", 1e300, "overhead"),
        ("left_out", ["torch"], "left_out"),
        ("model_id", "0" * 64, "is of model 000000000000, the bundle is of .*give a measurement of this bundle"),
        ("precision", "int4", "is of int4, the bundle is fp32"),
    ],
)
def test_measurements_that_lie_are_refused(tmp_path, opened, report, place: str, value: Any, said: str):
    document = json.loads(msgspec.json.encode(document_of(report)))
    with pytest.raises(UsageError, match=rf"bench\.json: .*{said}") as refused:
        read(tmp_path, opened, changed(document, place, value))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"[" * 99_999])
def test_what_is_no_measurement_is_refused(tmp_path: Path, opened: Bundle, data: bytes):
    with pytest.raises(UsageError, match=r"expected what `txl-deploy bench --json` writes; write one with"):
        read(tmp_path, opened, data)
