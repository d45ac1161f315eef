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
