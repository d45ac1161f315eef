"""Split the time of a step in ONNX Runtime by operators, from the profiles of all sessions that run the step."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnxruntime
from msgspec import Struct

from txl_deploy.bench.competitor import Competitor
from txl_deploy.bench.timing import Work

__all__ = ["OperatorTimes", "operator_times"]

WARM_UP = 50


class OperatorTimes(Struct, frozen=True, kw_only=True):
    """The times of one way to run a step, in µs.

    Attributes:
        call: the median processor time of a call without the profiler.
        engine: the median processor time inside the engine during a call.
        operators: for each type of operator, the number of its nodes in a call, and the time of all these nodes. The
            time is the mean without the slowest quarter, where other processes ran, and includes the profiler's own.
    """

    call: float
    engine: float
    operators: dict[str, tuple[float, float]]


def operator_times(open_way: Callable[[], Competitor], call: Callable[[Competitor], Work], calls: int) -> OperatorTimes:
    """Measure a call of one way by operators.

    Args:
        open_way: opens the way; it is called anew, because a profile has to be requested before a session opens.
        call: returns the timed function of an opened way.
        calls: the number of calls to measure.
    """
    whole, engine = _shares(open_way, call, calls)
    with tempfile.TemporaryDirectory() as folder:
        with _opening(Path(folder)) as sessions:
            work = call(open_way())
        _called(work, WARM_UP + calls)
        events: list[dict[str, Any]] = []
        for session in sessions:
            events += json.loads(Path(session.end_profiling()).read_text())
    runs = sorted(event["ts"] for event in events if event["name"] == "model_run")
    durations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= runs[-calls]:
            durations.setdefault((event["args"]["op_name"], event["name"]), []).append(event["dur"])
    operators: dict[str, tuple[float, float]] = {}
    for (operator, _), spent in durations.items():
        nodes, took = operators.get(operator, (0.0, 0.0))
        operators[operator] = (
            nodes + len(spent) / calls,
            took + statistics.fmean(sorted(spent)[: -(len(spent) // 4) or None]),
        )
    return OperatorTimes(call=whole, engine=engine, operators=operators)


def _shares(open_way: Callable[[], Competitor], call: Callable[[Competitor], Work], calls: int) -> tuple[float, float]:
    """Return the median processor times in µs of a call, and of the engine's part of a call."""
    spent: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def running(*given: Any, **named: Any) -> Any:
            started = time.process_time()
            result = run(*given, **named)
            spent[-1] += time.process_time() - started
            return result

        return running

    with _opening(None) as sessions:
        work = call(open_way())
    for session in sessions:
        for name in ("run", "run_with_iobinding", "run_with_ort_values"):
            setattr(session, name, timed(getattr(session, name)))
    whole: list[float] = []
    for number in range(WARM_UP + calls):
        spent.append(0.0)
        started = time.process_time()
        work(number)
        whole.append(time.process_time() - started)
    return 1e6 * statistics.median(whole[WARM_UP:]), 1e6 * statistics.median(spent[WARM_UP:])


def _called(work: Work, calls: int) -> None:
    for number in range(calls):
        work(number)


@contextmanager
def _opening(profiles: Path | None) -> Iterator[list[Any]]:
    """Collect ONNX Runtime's sessions that the block opens; with a folder, each session writes a profile to it."""
    sessions: list[Any] = []
    options, session = onnxruntime.SessionOptions, onnxruntime.InferenceSession

    def recording() -> Any:
        option_parser = options()
        if profiles is not None:
            option_parser.enable_profiling, option_parser.profile_file_prefix = True, str(profiles / "profile")
        return option_parser

    def opened(*given: Any, **named: Any) -> Any:
        sessions.append(session(*given, **named))
        return sessions[-1]

    with patch.object(onnxruntime, "SessionOptions", recording), patch.object(onnxruntime, "InferenceSession", opened):
        yield sessions
