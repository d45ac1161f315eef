"""`txl-deploy bench`: how fast a bundle is, compared with what memory delivers and with competitors."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import txl_runtime
import typer
from txl_runtime.errors import UsageError
from txl_runtime.model import Model

from txl_deploy.bench.competitor import Maker
from txl_deploy.bench.measuring import bench
from txl_deploy.bench.timing import available_cores
from txl_deploy.bench_tables import panels, report_document, show
from txl_deploy.commands.options import Backend, Bundle, Json, Threads
from txl_deploy.console import Display, print_json
from txl_deploy.extras import require_export
from txl_deploy.plotting import check_plot, draw

DEFAULT = ("torch", "torch-kv")
NONE = "none"


def run(
    bundle: Bundle,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="Competitors, separated by commas: torch, torch-bhlk, torch-kv, torch-compile, torch-bf16, "
            "onnx-hidden, onnx-rolled; or none. (default torch,torch-kv where PyTorch is installed)",
        ),
    ] = None,
    backend: Backend = "auto",
    threads: Threads = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Of timing, for each competitor at each kind of work.")
    ] = 2.0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw a picture too: FILE.png or FILE.svg.")] = None,
    json: Json = False,
) -> None:
    """Measure decoding, prefill and scoring with full memory, competitors in turns; load time and memory."""
    names = _names(against)
    if names:
        require_export("bench --against")
    if plot is not None:
        check_plot(plot)
    cores = available_cores() if threads is None else threads
    model = txl_runtime.load(bundle, backend=backend, threads=cores)
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder, Display() as display:
        makers, left_out = _makers(names, model, cores, Path(folder), asked=against is not None)
        for name, why in left_out.items():
            display.warn(f"{name} is left out: {why}")
        report = bench(model, makers, threads=cores, seconds=seconds, left_out=left_out, listener=display)
    if json:
        print_json(report_document(report))
    else:
        show(report)
    if plot is not None:
        draw(plot, panels(report))


def _names(against: str | None) -> tuple[str, ...]:
    if against is None:
        return () if find_spec("torch") is None else DEFAULT
    names = tuple(name.strip() for name in against.split(",") if name.strip())
    if not names or (NONE in names and len(names) > 1):
        raise UsageError(f"--against is {against!r}, expected names separated by commas, or none alone")
    if len(set(names)) < len(names):
        raise UsageError(f"--against is {against!r}, expected every name once")
    return () if names == (NONE,) else names


def _makers(
    names: tuple[str, ...], model: Model, threads: int, folder: Path, asked: bool
) -> tuple[dict[str, Maker], dict[str, str]]:
    """Makers of the competitors that can run here, and why the others cannot.

    Raises:
        UsageError: competitors were asked for by name, and none of them can run.
    """
    if not names:
        return {}, {}
    from txl_deploy.bench.competitors import competitors, why_not

    reasons = {name: why_not(name, model) for name in names}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    if asked and len(left_out) == len(names):
        name, why = next(iter(left_out.items()))
        raise UsageError(f"--against {name}: {why}; expected one that can run here, or none")
    chosen = tuple(name for name in names if name not in left_out)
    return competitors(chosen, model, threads, folder), left_out
