"""Tools that most tests build on: small random models, checkpoints, commands, servers and waiting."""

from __future__ import annotations

import importlib
import json
import linecache
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import txl_runtime
from txl_export.checkpoints.txl import FORMAT, TxlConfig
from txl_export.families.transformer_xl.weights import canonical_shapes
from txl_runtime.bundle.transformer_xl import ModelConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
ORACLE = FIXTURES / "oracle"
PACKAGES = Path(__file__).parents[2] / ".packages"
"""The folder of `make packages`: packages whose models tests export, and nothing else looks into."""

CLIENTS = Path(__file__).parents[2] / ".clients" / "bin" / "python"
"""The Python of `make clients`: openai, lm-eval, Ray, tritonclient and this project's runtime."""

CUDA = Path(__file__).parents[2] / ".cuda"
"""The folder of `make cuda`: ONNX Runtime with its CUDA provider, without CUDA's libraries, and NVIDIA's headers."""

SMALL = {
    "vocab_size": 60,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 16,
    "d_head": 8,
    "d_inner": 32,
    "d_embed": 16,
    "embedding_scale": 4.0,
    "memory_start": "empty",
    "memory_length": 7,
    "clamp_length": None,
    "same_length": False,
}


def typed(page: str) -> list[str]:
    """The commands of a page, or of a part of one: what stands behind a $, with the lines that a backslash joins."""
    return re.findall(r"^    \$ ((?:.*\\\n)*.*)$", page, re.MULTILINE)


def small_config(**changes: Any) -> dict[str, Any]:
    """The fields of an own checkpoint's config for a model that exports in seconds."""
    return SMALL | changes


def random_state(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Canonical weights of N(0, 0.3), layer norms around 1: every term of the model matters. Softmax tied."""
    typed = msgspec.convert(config, TxlConfig)
    names = ModelConfig.__struct_fields__
    must, _ = canonical_shapes(ModelConfig(**{name: getattr(typed, name) for name in names}))
    draws = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in must.items():
        values = torch.randn(shape, generator=draws) * 0.3
        state[name] = 1 + values * 0.6 if name.endswith("norm.weight") else values
    return state


def save_checkpoint(
    path: Path, config: dict[str, Any], state: dict[str, torch.Tensor] | None = None, **more: Any
) -> Path:
    """Write an own checkpoint; random weights unless given."""
    state = random_state(config) if state is None else state
    torch.save({"format": FORMAT, "version": 1, "config": config, "state": state, **more}, path)
    return path


def package(name: str) -> Any:
    """Import a package whose models tests export, or skip the test: `package("x_transformers")`.

    Its folder is the last on the path, so nothing that is installed is hidden. What an import changes in the process
    is put back, and what it says of itself, such as that it is old, is no matter of these tests.
    """
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    environment, root = dict(os.environ), logging.getLogger()
    handlers, level, threads, kind = [*root.handlers], root.level, torch.get_num_threads(), torch.get_default_dtype()
    draws = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, SyntaxWarning):
                warnings.simplefilter("ignore", category)
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed; make packages")
    finally:
        os.environ.clear()
        os.environ.update(environment)
        root.handlers[:] = handlers
        root.setLevel(level)
        torch.set_num_threads(threads)
        torch.set_default_dtype(kind)
        torch.set_rng_state(draws)


class Called(NamedTuple):
    """A command that ended: its exit code, standard output and standard error."""

    code: Any
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """Standard output, which has to be one JSON document and nothing else."""
        return json.loads(self.stdout)

    @property
    def lines(self) -> list[str]:
        """The lines of standard error."""
        return self.stderr.splitlines()

    @property
    def error(self) -> str:
        """The one line of a refusal; only notes and finished stages may stand before it."""
        assert (self.code, self.stdout) == (2, "")
        *before, error = self.lines
        assert all(line.startswith("note: ") or line.endswith(" s") for line in before), before
        assert error.startswith("error: ")
        return error


def call_main(
    arguments: Sequence[object], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Called:
    """A command in this process, what `txl-deploy` itself calls.

    It saves the seconds that importing torch takes. An error nobody foresaw comes out of it.
    """
    from txl_deploy.main import main

    monkeypatch.setattr("sys.argv", ["txl-deploy", *map(str, arguments)])
    monkeypatch.setenv("TXL_DEPLOY_TRACEBACK", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    capfd.readouterr()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for stream in (sys.stdout, sys.stderr):  # pytest reads back what was written through the same objects
            stream.reconfigure(errors="replace")
    captured = capfd.readouterr()
    return Called(ended.value.code, captured.out, captured.err)


def cli(*arguments: object, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `txl-deploy` in a process of its own, as a user does; stdout and stderr as text.

    With packages=True what `make packages` installs can be imported there.
    """
    started = ["-m", "txl_deploy"]
    if options.pop("packages", False):
        started = ["-c", f"import sys; sys.path.append({str(PACKAGES)!r}); from txl_deploy.main import main; main()"]
    command = [sys.executable, *started, *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200", "TXL_DEPLOY_TRACEBACK": "1"} | options.pop("env", {})
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
        check=False,
        **options,
    )


def _leaves(frame: FrameType) -> bool:
    """Return whether a line is traced because the `with` that it begins ends."""
    code, line = frame.f_code, frame.f_lineno
    if not linecache.getline(code.co_filename, line).lstrip().startswith("with "):
        return False
    return frame.f_lasti > min(start for start, _, number in code.co_lines() if number == line)


def interrupted(call: Callable[[], Any], line: int, *places: str) -> bool:
    """Run a call and interrupt it before the n-th line of the runtime that it runs; whether it came that far.

    Only lines of the rooms or modules named count, where some are: "streaming", "device/loop". A line that begins a
    `with` counts where it begins. It is traced once more where the block ends; there the interpreter looks at no signal
    before it is in what leaves the block, whose own lines count.
    """
    left = line
    runtime = Path(txl_runtime.__file__).parent
    inside = tuple(str(runtime / place) for place in places or ("",))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(inside):
            return None
        if event == "line" and not _leaves(frame):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def until(look: Callable[[], Any], seconds: float = 120) -> Any:
    """Return a look's first result that is true; the seconds are those that the busiest machine may need."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.01)
    return found


def clients() -> Path:
    """The Python of the environment that `make clients` makes; the test is skipped where there is none."""
    if not CLIENTS.exists():
        pytest.skip("no environment of clients here; make clients")
    return CLIENTS


class Counted:
    """An engine that notes how many sequences each segment is computed for."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.rows = engine, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def bind(self, program: Any, inputs: Any, outputs: Any) -> Any:
        call = self._engine.bind(program, inputs, outputs)
        if "valid" not in inputs:  # a softmax knows no sequences
            return call

        def counted() -> None:
            self.rows.append(len(inputs["valid"]))
            call()

        return counted
