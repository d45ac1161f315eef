"""Define the tasks at which a bundle is timed: three tasks for a Transformer-XL, steps for any other model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from txl_report.schema.measurement import BUNDLE
from txl_runtime.model import Model

from txl_deploy.bench.competitor import BundleCompetitor, Competitor, TokenCompetitor
from txl_deploy.bench.driving import is_transformer_xl, random_inputs
from txl_deploy.bench.timing import Work

SEGMENTS = 16
"""Number of different segments that the calls of a task use in turns."""


class Task(NamedTuple):
    """A kind of work: the result that is computed for each segment of `segment_length` tokens.

    `decode` computes the log-probabilities after one token; `prefill` computes only the most likely token after a
    segment; `score` computes the negative log-likelihood of every token of a segment; `step` computes all outputs.
    """

    kind: str
    segment_length: int


class Works:
    """The tasks of a bundle: decoding, prefill and scoring for a Transformer-XL, steps for any other model.

    Attributes:
        model: the loaded bundle.
        ours: the bundle as a competitor.
        memory_form: "kv" or "hidden" for a Transformer-XL; None for a model timed at its steps.
        tasks: decode with segments of 1, prefill and score with the longest segments; for any other model, step with
            segments of every length.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.ours, manifest = model, BundleCompetitor(BUNDLE, model), model.manifest
        self.memory_form: str | None = None
        self.tasks = tuple(Task("step", length) for length in model.segment_lengths)
        if is_transformer_xl(manifest):
            self.memory_form, longest = manifest.transformer_xl.memory, model.segment_lengths[0]
            long = (Task("prefill", longest),) if longest > 1 else ()
            self.tasks = (Task("decode", 1), *long, Task("score", longest))

    @property
    def shortest(self) -> Task:
        """Return the task with the shortest segments, in which the cost of Python shows most."""
        return min(self.tasks, key=lambda task: task.segment_length)

    def call(self, competitor: Competitor, task: Task) -> Work:
        """Return a function that runs a task once; consecutive calls use different segments."""
        length = task.segment_length + (task.kind == "score")
        segments = [random_inputs(self.model.manifest, length, seed) for seed in range(SEGMENTS)]
        if task.kind == "step":
            return lambda index: competitor.run(segments[index % SEGMENTS])
        assert isinstance(competitor, TokenCompetitor)
        calls: dict[str, Callable[[Any], object]] = {
            "decode": competitor.logprobs,
            "prefill": competitor.next_token,
            "score": competitor.score,
        }
        call, tokens = calls[task.kind], [array for inputs in segments for array in inputs.values()]
        return lambda index: call(tokens[index % SEGMENTS])

    def rates(self, size: int, positions: int, per_second: float) -> dict[str, Any]:
        """Return the fields of a `Row` for bytes and speed, if a call reads `size` bytes for `positions` positions."""
        if self.memory_form is None:
            return {"positions_per_second": per_second, "bytes_per_step": size}
        return {"tokens_per_second": per_second, "bytes_per_token": size / positions}

    def conditions(self) -> dict[str, Any]:
        """Return the fields of `Conditions` that describe the full state and the inputs."""
        stream = self.ours.stream
        if self.memory_form is None:
            shapes = {name: array.shape for name, array in stream.state().items()}
            return {"state": shapes, "inputs": "normal values, uniformly random ids"}
        rows, length = tuple(stream.fill.tolist()), self.model.manifest.memory_length
        return {"memory_length": length, "memory_rows": rows, "tokens": "uniformly random ids"}
