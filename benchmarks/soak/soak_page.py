"""Write the page of a run of `soak.py` with slopes, tables and pictures; matplotlib draws the pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.tables import Table
from txl_deploy.plotting import check_plot, draw

HOME = Path(__file__).parents[2] / "docs" / "measurements"
WARM = 0.2
"""The share of a run that counts as warm-up, in which caches and the allocator's arenas fill."""
BATCHES, STUDENT = 20, 2.101
"""The number of stretches whose means give a slope, and Student's t for its 95 % interval (18 degrees of freedom)."""
LONG = 100_000
"""The smallest number of steps of a run for which the slope of its memory is judged."""
GROWTH = 5.0
"""The limit of the lower end of a slope's interval, in MB per million steps; a process that grows faster leaks."""
COUNTED = ("descriptors", "threads", "files", "mapped", "mappings")
ANONYMOUS = 40
"""The allowed growth of the number of mappings, because the allocator maps and unmaps memory as it needs."""
MEMORY = (
    ("resident", "resident memory, MB"),
    ("allocated", "allocated by malloc, MB"),
    ("python", "Python's blocks, thousands"),
)
SCALE = {"resident": 1e6, "allocated": 1e6, "python": 1e3}

Samples = Sequence[dict[str, Any]]


def warm(samples: Samples) -> Samples:
    """Return the samples of a run without the samples of the warm-up."""
    return samples[int(len(samples) * WARM) :]


def slope(samples: Samples, name: str) -> tuple[float, float] | None:
    """Return a figure's growth per million steps after the warm-up, and half the width of its 95 % interval.

    The slope is fitted to the means of stretches: neighbouring samples are similar, and would make the interval too
    small. None if there are too few samples.
    """
    pairs = [
        (sample["step"] / 1e6, sample[name] / SCALE.get(name, 1))
        for sample in warm(samples)
        if sample[name] is not None
    ]
    if len(pairs) < 2 * BATCHES:
        return None
    x, y = np.array([np.mean(some, axis=0) for some in np.array_split(np.array(pairs), BATCHES)]).T
    spread = ((x - x.mean()) ** 2).sum()
    result = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    rest = y - y.mean() - result * (x - x.mean())
    return result, float(STUDENT * np.sqrt((rest**2).sum() / (BATCHES - 2) / spread))


def leaks(samples: Samples) -> list[str]:
    """Return a sentence for each figure that grew and should not have; [] if there is none."""
    wrong, steady = [], warm(samples)
    half = len(steady) // 2
    for name in COUNTED:
        before, after = ([s[name] for s in some if s[name] is not None] for some in (steady[:half], steady[half:]))
        # the minima of both halves are compared, so that files that are open only for a while do not count
        if before and after and min(after) > min(before) + (ANONYMOUS if name == "mappings" else 0):
            wrong.append(f"{name} grew from {min(before)} to {min(after)}")
    for name in ("resident", "allocated"):
        result = slope(samples, name)
        if samples[-1]["step"] >= LONG and result is not None and result[0] - result[1] > GROWTH:
            wrong.append(f"{name} memory grows by {result[0]:.1f} ± {result[1]:.1f} MB per million steps")
    return wrong


def tables(document: dict[str, Any]) -> list[Table]:
    """Return the tables of a run: the run itself, memory, times, errors, and errors of the state that never forgets."""
    samples, held, own, reloads = (document[name] for name in ("samples", "held", "own", "reloads"))
    steady = warm(samples)
    run = Table(("steps", "seconds", "reloads", "replacements", "neither version", "what must not be"))
    loads = reloads.get("loads", 0)
    run.add(
        f"{samples[-1]['step']:,}",
        document["seconds"],
        loads,
        reloads["replacements"],
        sum("neither" in text for text in reloads["wrong"]),
        len(document["wrong"]),
    )
    grown = Table(("after the warm-up", "first", "last", "least", "most", "per million steps"))
    for name, title in (*MEMORY, *((name, name) for name in COUNTED)):
        values = [sample[name] / SCALE.get(name, 1) for sample in steady if sample[name] is not None]
        if values:
            result = slope(samples, name)
            text = None if result is None else f"{result[0]:+.3g} ± {result[1]:.2g}"
            grown.add(title, *(f"{value:.5g}" for value in (values[0], values[-1], min(values), max(values))), text)
    times = Table(("decode step, ms", "p50", "p99", "largest"))
    for title, some in zip(("first tenth", "middle tenth", "last tenth"), _tenths(samples), strict=True):
        times.add(title, *(float(np.median([s[n] for s in some])) for n in ("p50", "p99")), max(s["max"] for s in some))
    drift = Table(
        (
            "largest error",
            "log-probabilities",
            "memory (relative)",
            "log-probabilities, fresh stream",
            "memory, fresh stream",
        )
    )
    quarter = max(len(held) // 4, 1)
    for title, some in (
        (f"first {quarter} looks", held[:quarter]),
        (f"last {quarter} looks", held[-quarter:]),
        ("end", held[-1:]),
    ):
        drift.add(
            title, *(f"{max(s[n] for s in some):.1e}" for n in ("logprobs", "memory", "logprobs_fresh", "memory_fresh"))
        )
    never = Table(
        ("a state that never forgets, after", "shown", "phase", "total", "PyTorch's float32: shown", "phase", "total")
    )
    for look in [own["looks"][0], own["looks"][len(own["looks"]) // 2], own["looks"][-1]]:
        never.add(f"{look['step']:,} steps", *(f"{error:.1e}" for error in (*look["bundle"], *look["float32"])))
    return [run, grown, times, drift, never]


def _tenths(samples: Samples) -> list[Samples]:
    tenth, middle = max(len(samples) // 10, 1), len(samples) // 2
    return [samples[:tenth], samples[middle : middle + tenth], samples[-tenth:]]


def write(whole: dict[str, Any], folder: Path) -> None:
    """Write the page soak.md and its picture soak.png to a folder, from the document that a run stored."""
    document, picture = whole["results"], folder / "soak.png"
    check_plot(picture)
    options, operations = whole["options"], document["operations"]
    total = sum(operations.values())
    shares = ", ".join(
        f"{name} {count / total:.1%}" for name, count in sorted(operations.items(), key=lambda pair: -pair[1])
    )
    parts = dict(zip(("run", "grown", "times", "drift", "never"), tables(document), strict=True))
    seconds = document["reloads"]["seconds"]
    draw(picture, [partial(panel, document) for panel in (_memory, _times, _errors, _never)])
    about = (
        f"{total:,} steps at random (seed {options['seed']}) in {document['seconds']:,.0f} s, of {document['model']}: "
        f"{shares}. The process has no PyTorch."
    )
    facts = {
        "about": textwrap.fill(about, 118),
        "interval": f"{options['interval']:g}",
        "conditions": textwrap.fill(f"Conditions: {whole['conditions']}", 118),
        "wrong": "\n".join(f"* {line}" for line in document["wrong"]) or "Nothing was found that must not be.",
        "picture": picture.name,
        "windows": len(document["samples"]),
        "looks": len(document["held"]),
        "loads": len(seconds),
        "load": f"{np.median(seconds) * 1e3:.0f}",
        "slowest": f"{max(seconds) * 1e3:.0f}",
    }
    (folder / "soak.md").write_text(PAGE.format(**facts, **{name: table.markdown() for name, table in parts.items()}))


PAGE = """\
# A long run

After `make demo MINUTES=1` and `python benchmarks/soak/soak.py --out soak`, this page was written by
`python benchmarks/soak/soak.py --page soak/soak.json`.

{about}

Beside the stream, a thread of the same process reloads another bundle every {interval} s, at the moment when another
process replaces that bundle by a version with other weights, as `export --force` does. Each model that is loaded has to
answer one known feed as the one version does or as the other does, to the bit; the model that was open before has to go
on answering as it did, and is then dropped.

{run}

{wrong}

![Memory, time of a decode step, and errors over the run]({picture})

{conditions}

## What the process takes

Measured {windows} times; the first fifth is warm-up. A slope goes through the means of twenty stretches and has its
95 % interval. "Allocated" is what glibc says is in use (`mallinfo2`), mappings are lines of `/proc/self/maps`, mapped
are those of files, and files are those in the process's temporary folder: four snapshots of the test itself with their
notes.

{grown}

## Time of a decode step

Medians over windows of p50 and p99, and the largest of all. The machine had other work to do: read the trend and not
the values.

{times}

Loading the replaced bundle took {load} ms (median of {loads}; the slowest took {slowest} ms).

## Drift

At {looks} moments, the last layers × (M + L) tokens of each sequence were fed again with the same cuts, to the
reference in float64 and to a fresh stream; then all of them got the same further segment. Log-probabilities are in
nats, the memory is relative to max(1, largest value). The limit is 1e-4.

{drift}

A state that never forgets (`benchmarks/soak/soak_own.py`) is a rotation, a sum and a count, compared with the module in
float64. Rounding adds up there in any float32. The bundle's error must be at most twice that of PyTorch's float32, plus
1e-6, and the count exact.

{never}
"""


def _memory(document: dict[str, Any], axes: Any) -> None:
    """Draw the resident memory, and the memory that malloc handed out, by step."""
    for name, title in MEMORY[:2]:
        pairs = [(s["step"], s[name] / SCALE[name]) for s in document["samples"] if s[name] is not None]
        if pairs:
            axes.plot(*zip(*pairs, strict=True), label=title)
    axes.set(xlabel="steps", ylabel="MB", ylim=(0, None), title="memory of the process")
    axes.legend()


def _times(document: dict[str, Any], axes: Any) -> None:
    """Draw p50, p99 and the largest time of a decode step for each window of steps."""
    for name in ("p50", "p99", "max"):
        axes.plot([s["step"] for s in document["samples"]], [s[name] for s in document["samples"]], label=name)
    axes.set(xlabel="steps", ylabel="ms", yscale="log", title="a decode step, by window")
    axes.legend()


def _errors(document: dict[str, Any], axes: Any) -> None:
    """Draw the largest errors against the reference by step, and their limit."""
    for name, title in (("logprobs", "log-probabilities"), ("memory", "memory (relative)")):
        axes.plot([s["step"] for s in document["held"]], [s[name] for s in document["held"]], ".-", label=title)
    axes.axhline(1e-4, color="grey", linestyle=":", label="limit")
    axes.set(xlabel="steps", yscale="log", title="largest error against the reference in float64")
    axes.legend()


def _never(document: dict[str, Any], axes: Any) -> None:
    """Draw the errors of the state that never forgets by step, of the bundle and of PyTorch's float32."""
    looks = document["own"]["looks"]
    for place, title in ((1, "phase"), (2, "total")):
        axes.plot([s["step"] for s in looks], [s["bundle"][place] for s in looks], label=f"{title}, bundle")
        axes.plot(
            [s["step"] for s in looks], [s["float32"][place] for s in looks], ":", label=f"{title}, PyTorch float32"
        )
    axes.set(xlabel="steps", xscale="log", yscale="log", title="a state that never forgets, against float64")
    axes.legend()
