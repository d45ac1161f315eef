"""`txl-deploy bench`: measure the speed of a bundle, compared with the memory's speed and with competitors."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.sources import asked_module
from txl_report.schema.measurement import Agreement, Measurement
from txl_runtime.errors import UsageError
from txl_runtime.model import Model

from txl_deploy.bench.competitor import Competitor, Maker
from txl_deploy.bench.measuring import bench, check_times
from txl_deploy.bench.timing import available_cores
from txl_deploy.bench.works import Works
from txl_deploy.bench_tables import document_of, panels, show
from txl_deploy.commands.options import Backend, Bundle, Json, Module, Threads, like_export
from txl_deploy.commands.own_modules import own_frames
from txl_deploy.console import Display, print_json
from txl_deploy.extras import require_export
from txl_deploy.loading import load_alone
from txl_deploy.plotting import check_plot, draw

DEFAULT = ("torch", "torch-kv")
"""Competitors of a Transformer-XL if --against is not given."""
OWN_DEFAULT = ("torch", "torch-compile")
"""Competitors of a user's own model if --against is not given."""
NONE = "none"
"""Value of --against with which no competitor is measured."""


def run(
    bundle: Bundle,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="Competitors, separated by commas: torch, torch-kv; of a model of your own torch, torch-compile; or "
            "none. (default both, where PyTorch is installed; of a model of your own with --module)",
        ),
    ] = None,
    module: Module = None,
    adapter: Annotated[str | None, like_export("adapter")] = None,
    config: Annotated[Path | None, like_export("config")] = None,
    weights: Annotated[Path | None, like_export("weights")] = None,
    backend: Backend = "auto",
    threads: Threads = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Of timing, for each competitor at each kind of work.")
    ] = 2.0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw a picture too: FILE.png or FILE.svg.")] = None,
    json: Json = False,
) -> None:
    """Measure decoding, prefill and scoring with full memory, competitors in turns; load time and memory.

    Of a model of your own, its steps are measured, with segments of every length.
    """
    asked = None if against is None else _names(against)
    source = asked_module(module, weights, adapter, config)
    if asked or source is not None:
        require_export("bench --against")
    if weights is not None and source is None:
        raise UsageError("--weights is given without --module; give --module FILE.py:FUNCTION or --adapter NAME too")
    if plot is not None:
        check_plot(plot)
    check_times(seconds)
    cores = available_cores() if threads is None else threads
    works = Works(load_alone(bundle, backend=backend, threads=cores))
    if source is not None and works.memory_form is not None:
        raise UsageError(
            f"{bundle}: is a Transformer-XL's, which is compared by its own weights, "
            f"{'--module' if adapter is None else '--adapter'} is for a model of your own; leave it out"
        )
    measurement = _measured(works, asked, source, None if adapter else weights, cores, seconds)
    if json:
        print_json(document_of(measurement))
    else:
        show(measurement)
    if plot is not None:
        draw(plot, panels(measurement))


def _measured(
    works: Works,
    asked: tuple[str, ...] | None,
    source: str | Adapted | None,
    weights: Path | None,
    threads: int,
    seconds: float,
) -> Measurement:
    """Measure the bundle and its competitors, if any. Lines that the user's code prints go to standard error."""
    own = works.memory_form is None
    there = source is not None if own else find_spec("torch") is not None
    usual = OWN_DEFAULT if own else DEFAULT
    names = asked if asked is not None else usual if there else ()
    if names and own and source is None:
        raise UsageError(
            f"--against {names[0]} compares a model of your own with its module; give --module FILE.py:FUNCTION and "
            "--weights, or --against none"
        )
    if names:
        require_export("bench --against")
    others, agreement, left_out = list[Competitor](), dict[str, Agreement](), dict[str, str]()
    with Display() as display, own_frames(), redirect_stdout(sys.stderr):
        if names:
            from txl_deploy.bench.competitors.agreement import compared

            makers, left_out = _makers(names, source, weights, works.model, threads, display)
            _tell(display, names, left_out, left_out, asked is not None)
            others, agreement, failed = compared(works, makers, display)
            left_out |= failed
            _tell(display, names, left_out, failed, asked is not None)
        return bench(works, others, agreement, threads=threads, seconds=seconds, left_out=left_out, listener=display)


def _tell(display: Display, names: tuple[str, ...], left_out: dict[str, str], new: dict[str, str], asked: bool) -> None:
    """Warn of competitors that were left out; raise UsageError if the user named competitors and none can run."""
    if asked and len(left_out) == len(names):
        name, why = next(iter(left_out.items()))
        raise UsageError(f"--against {name}: {why}; expected one that can run here, or none")
    for name, why in new.items():
        display.warn(f"{name} is left out: {why}")


def _names(against: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in against.split(",") if name.strip())
    if not names or (NONE in names and len(names) > 1):
        raise UsageError(f"--against is {against!r}, expected names separated by commas, or none alone")
    if len(set(names)) < len(names):
        raise UsageError(f"--against is {against!r}, expected every name once")
    return () if names == (NONE,) else names


def _makers(
    names: tuple[str, ...],
    source: str | Adapted | None,
    weights: Path | None,
    model: Model,
    threads: int,
    listener: Display,
) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return makers of the competitors that can run here, and the reason for each competitor that cannot."""
    if source is not None:
        from txl_deploy.bench.competitors.own_module import own_competitors

        return own_competitors(names, source, None if weights is None else str(weights), model, threads, listener)
    from txl_deploy.bench.competitors import competitors

    return competitors(names, model, threads)
