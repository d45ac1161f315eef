"""torch's tracer in a process of its own, because it can end the process that it runs in.

The tracer follows one run of the module and keeps the operators that it saw.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from txl_runtime.errors import one_line
from txl_runtime.starting import signal_of

TIME_LIMIT = 300.0
"""Seconds."""
_TELLS = 3000
"""Characters of an error that are passed on."""


class TracerError(Exception):
    """The tracer did not write a graph; the message says why."""


def trace(
    network: nn.Module,
    given: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    seconds: float = TIME_LIMIT,
) -> ir.Model:
    """The graph of one run, traced in a child process. Where processes cannot fork, the network has to be picklable.

    Args:
        network: to trace.
        given: its arguments.
        inputs, outputs: their names, and those of its results.
        opset: of the standard.
        seconds: that it may take.

    Raises:
        TracerError: it failed, took too long, or its process died.
    """
    fork = sys.platform == "linux"
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    with tempfile.TemporaryDirectory(prefix="txl-deploy-tracer-") as place:
        folder = Path(place)
        child = context.Process(
            target=_child, args=(network, given, list(inputs), list(outputs), opset, folder), daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking beside other threads: the child keeps to one thread
            try:
                child.start()
            except Exception as error:  # whatever pickling raises
                raise TracerError(f"the module cannot be given to another process: {one_line(error)}") from error
        try:
            child.join(seconds)
            if child.is_alive():
                raise TracerError(f"the tracer took longer than {seconds:.0f} seconds")
        finally:
            if child.is_alive():
                child.kill()
                child.join()
        failure = folder / "error.txt"
        if failure.is_file():
            raise TracerError(failure.read_text(encoding="utf-8", errors="replace"))
        if child.exitcode:
            name = signal_of(child.exitcode)
            how = f"died of {name}" if name else f"ended with exit code {child.exitcode}"
            raise TracerError(f"the tracer's process {how}")
        model = ir.load(folder / "graph.onnx")
        ir.external_data.load_to_model(model)
        return model


def _child(
    network: nn.Module,
    given: tuple[Tensor, ...],
    inputs: list[str],
    outputs: list[str],
    opset: int,
    folder: Path,
) -> None:
    """Trace, and leave the graph or what went wrong in the folder."""
    torch.set_num_threads(1)  # threads do not survive a fork
    logging.disable(logging.CRITICAL)
    with (folder / "printed").open("w") as printed, contextlib.redirect_stdout(printed):
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    network,
                    given,
                    str(folder / "graph.onnx"),
                    dynamo=False,
                    opset_version=opset,
                    input_names=inputs,
                    output_names=outputs,
                )
        except BaseException as error:  # the parent decides what becomes of it
            told = f"{type(error).__name__}: {one_line(error)}"
            (folder / "error.txt").write_text(told[:_TELLS], encoding="utf-8")
