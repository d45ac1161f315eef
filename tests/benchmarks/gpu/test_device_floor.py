"""The table of floors of devices: computed by the functions of `bench`, and so is what the documents show of it."""

from __future__ import annotations

from pathlib import Path

import device_floor as benchmark
import pytest

from txl_deploy.bench.floor import device_floor

ROOT = Path(__file__).parents[3]


def rows(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose head begins with these words."""
    lines = text[text.index(first) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def value(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_further_layers_add_what_the_second_does() -> None:
    one = {"weights": 110, "embedding": 1, "memory": 20, "positions": 3}, 13
    two = {"weights": 210, "embedding": 1, "memory": 40, "positions": 6}, 23
    twelve = {"weights": 1210, "embedding": 1, "memory": 240, "positions": 36}, 123
    assert benchmark.extended(one, two, 12) == twelve
    assert benchmark.extended(one, two, 1) == one


def test_the_page_shows_what_the_functions_compute() -> None:
    page = (ROOT / "docs/measurements/devices.md").read_text()
    sizes = {row[0]: row[1:] for row in rows(page, "| model | weights")}
    floors = rows(page, "| model | device")
    assert sizes.keys() == benchmark.MODELS.keys()
    assert {(row[0], row[1]) for row in floors} == {
        (m, device) for m in benchmark.MODELS for device in benchmark.DEVICES
    }
    for model, device, speed, *times, measured in floors:
        *parts, size, kernels = map(value, sizes[model])
        assert size == pytest.approx(sum(parts), rel=0.006), "shown in three digits"
        assert value(speed) == pytest.approx(benchmark.DEVICES[device], rel=0.006)
        floor = device_floor("", benchmark.DEVICES[device], round(size * 1e6), int(kernels))
        assert [value(time) for time in times] == pytest.approx(
            [floor.us, floor.goal_us, floor.us_per_kernel], rel=0.012
        )
        assert measured == "not measured"


def test_a_table_that_is_made_has_every_device() -> None:
    size = {"weights": 90_000_000, "embedding": 0, "memory": 9_000_000, "positions": 1_000_000}
    parts, times = benchmark.tables_of({"a model": (size, 100)})
    assert parts.rows == [("a model", 90.0, 0.0, 9.0, 1.0, 100.0, 100)]
    nearest = dict(zip(times.columns, next(row for row in times.rows if row[1] == "RTX 3060, 12 GB"), strict=True))
    assert nearest["floor, µs"] == pytest.approx(1e8 / 360e9 * 1e6)
    assert nearest["µs per kernel"] == pytest.approx(1e8 / 360e9 * 1e6 / 0.6 / 100)
    assert {row[-1] for row in times.rows} == {"not measured"}
