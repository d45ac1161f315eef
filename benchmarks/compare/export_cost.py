"""Measure the processor seconds that exports of small own modules take, in one checkout or in two, in turns.

    python benchmarks/compare/export_cost.py [../old-checkout] [--rounds 3] [--only gru …] [--out FILE]

Each export runs in a process of its own with the packages of one checkout. The processes that the export starts are
counted too. The seconds are split by the stages that the export reports: `import` ends when `export` is called,
`look` ends when the first graph is captured, `capture` ends when all graphs are written, and `prove` goes from the
vectors of the self-test to the end. The side that begins changes with every round. The table has each side's cheapest
round, which other work on the machine disturbed least.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bit_equality import environment_of

from benchmarks.shared.tables import Table

PARTS = ("import", "look", "capture", "prove")
_BEGINS = {"capture and check": "capture", "compute self-test vectors": "prove"}
"""The first words of a stage that the export reports, and the part of the table that begins with that stage."""


def spent() -> float:
    """Return the processor seconds so far of this process and of its child processes that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _recurrent(kind: str) -> Any:
    import torch
    from torch import Tensor, nn
    from txl_export import InputSpec, StateSpec, StepSpec

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward, self.action, self.value = nn.Linear(24, 64), nn.Linear(64, 6), nn.Linear(64, 1)
            self.cell: Any = (nn.GRU if kind == "gru" else nn.LSTM)(64, 64, batch_first=True)

        def forward(self, obs: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
            hidden, held = self.cell(torch.tanh(self.inward(obs)), states[0] if kind == "gru" else states)
            return self.action(hidden), self.value(hidden), *((held,) if kind == "gru" else held)

    states = [StateSpec(name, (1, "B", 64)) for name in ("h" if kind == "gru" else "hc")]
    return StepSpec(Policy(), [InputSpec("obs", ("B", "L", 24))], states, ["action", "value"])


def _convolutions() -> Any:
    import torch
    from torch import Tensor, nn
    from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

    class Causal(nn.Module):
        """Causal convolutions over frames of a spectrum around a GRU over time; their last frames are states."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 8, (3, 5), (1, 2), (0, 2)), nn.Conv2d(8, 8, (3, 3), (1, 1), (0, 1))
            self.norm, self.act = nn.BatchNorm2d(8), nn.PReLU()
            self.over_time, self.mixed = nn.GRU(8 * 17, 32, batch_first=True), nn.Linear(32, 8 * 17)
            self.back = nn.ConvTranspose2d(8, 2, (1, 5), (1, 2), (0, 2))

        def forward(self, frames: Tensor, one: Tensor, two: Tensor, h: Tensor) -> tuple[Tensor, ...]:
            x = torch.cat([one, frames], 2)
            one, x = x[:, :, -2:], self.act(self.norm(self.first(x)))
            x = torch.cat([two, x], 2)
            two, x = x[:, :, -2:], torch.relu(self.second(x))
            batch, channels, length, width = x.shape
            hidden, h = self.over_time(x.permute(0, 2, 1, 3).flatten(2), h)
            x = x + self.mixed(hidden).view(batch, length, channels, width).permute(0, 2, 1, 3)
            return frames * torch.tanh(self.back(x)), one, two, h

    states = [StateSpec("one", ("B", 2, 2, 33)), StateSpec("two", ("B", 8, 2, 17)), StateSpec("h", (1, "B", 32))]
    filtered = OutputSpec("filtered", ("B", 2, "L", 33))
    return StepSpec(Causal(), [InputSpec("frames", ("B", 2, "L", 33))], states, [filtered], segment_lengths=[8, 1])


def _compressive() -> Any:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
    from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec

    layers, width, heads, rows, old_rows, words = 2, 32, 4, 8, 4, 50

    class Compressive(nn.Module):
        """Two memories that begin without rows; two rows that leave the first become one row of the second."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(words, width), nn.Linear(width, words)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
            self.mixes = nn.ModuleList(nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(layers))
            self.compress = nn.ModuleList(nn.Conv1d(width, width, 2, 2) for _ in range(layers))

        def forward(self, tokens: Tensor, memory: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, kept, kept_old = self.embed(tokens), [], []
            for layer, (norm, mix, compress) in enumerate(zip(self.norms, self.mixes, self.compress, strict=True)):
                here = norm(x)
                seen = torch.cat([old[layer], memory[layer], here], 1)
                x = x + mix(here, seen, seen, need_weights=False)[0]
                all_rows = torch.cat([memory[layer], here], 1)
                left = all_rows[:, :-rows]
                left = functional.relu(compress(left.mT).mT) if left.shape[1] else left
                kept.append(all_rows[:, -rows:])
                kept_old.append(torch.cat([old[layer], left], 1)[:, -old_rows:])
            return self.out(x), torch.stack(kept), torch.stack(kept_old)

    states = [
        StateSpec("memory", (layers, "B", rows, width), grows=2),
        StateSpec("old", (layers, "B", old_rows, width), grows=2),
    ]
    tokens = InputSpec("tokens", ("B", "L"), tokens=words)
    logits = OutputSpec("logits", role="logits")
    return StepSpec(Compressive(), [tokens], states, [logits], segment_lengths=[4])


MODELS: dict[str, Callable[[], Any]] = {
    "gru": lambda: _recurrent("gru"),
    "lstm": lambda: _recurrent("lstm"),
    "convolutions": _convolutions,
    "compressive": _compressive,
}
"""The exported models by name: two policies of one layer, convolutions with caches, a memory with a compressed one."""


def work(name: str, batch_size: int) -> dict[str, float]:
    """Export a model in this process, and return the processor seconds of each part."""
    import torch
    import txl_export
    from txl_runtime.listener import Listener

    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec, marks = MODELS[name](), [("import", 0.0)]

    class Marking(Listener):
        def stage(self, title: str, total: int | None = None) -> None:
            for words, part in _BEGINS.items():
                if title.startswith(words) and part not in dict(marks):
                    marks.append((part, spent()))

    marks.append(("look", spent()))
    with tempfile.TemporaryDirectory() as place:
        txl_export.export(spec, Path(place) / "own.txl", batch_size=batch_size, listener=Marking())
        marks.append(("", spent()))
    return {part: after - begun for (part, begun), (_, after) in pairwise(marks)}


def measured(source: Path, name: str, batch_size: int) -> dict[str, float]:
    """Export a model in a new process with a checkout's packages, and return the processor seconds of each part."""
    python = source / ".venv/bin/python"
    command = [str(python if python.is_file() else sys.executable), __file__, "--work", name, "-b", str(batch_size)]
    environment = environment_of(source) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{source}, {name}: {done.stderr}")
    results: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return results


def compared(
    sources: Sequence[Path], names: Sequence[str], rounds: int, batch_size: int
) -> dict[str, list[dict[str, float]]]:
    """Export every model with every checkout in each round; return the parts of the cheapest, by model and side."""
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(rounds):
        for name in names:
            sides = range(len(sources))
            for side in sides if number % 2 else reversed(sides):
                runs.setdefault((name, side), []).append(measured(sources[side], name, batch_size))
    return {
        name: [min(runs[name, side], key=lambda run: sum(run.values())) for side in range(len(sources))]
        for name in names
    }


def main() -> None:
    """Read the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("-b", "--batch-size", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        sys.stdout.write(json.dumps(work(options.work, options.batch_size)) + "\n")
        return
    here = Path(__file__).resolve().parents[2]
    sources = [options.old.resolve(), here] if options.old else [here]
    result = compared(sources, options.only, options.rounds, options.batch_size)
    table = Table(
        ("model", "checkout", *PARTS, "all", "of the old"),
        title=f"processor seconds of an export, B = {options.batch_size}",
    )
    for name, sides in result.items():
        for side, source in zip(sides, ("old", "new")[-len(sides) :], strict=True):
            total, first = sum(side.values()), sum(sides[0].values())
            seconds = [f"{side.get(part, 0.0):.1f}" for part in PARTS]
            table.add(name, source, *seconds, f"{total:.1f}", f"{total / first:.2f}")
    sys.stdout.write(f"{table.markdown()}\n")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
