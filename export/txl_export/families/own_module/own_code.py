"""Turns exceptions of the user's own code into one line with the place, and keeps the traceback of that code."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from txl_runtime.errors import TxlError, UsageError, one_line

_OURS = Path(__file__).resolve().parents[2]
_PYTHONS = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib"))
_CALLER = str(Path(__file__).with_name("module_call.py"))
_CAPTURING = frozenset({"torch", "sympy", "onnx", "onnxscript", "onnx_ir"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders with packages; an environment may use its own folder and the system's."""
_FLOAT_INDICES = re.compile(
    r"argument #1 'indices' to have one of the following scalar types|tensors used as indices must be"
    r"|Expected dtype int64 for index|index tensor of type LongTensor"
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LACKS_ARGUMENTS = re.compile(r"forward\(\) missing \d+ required positional argument")


class OwnCodeError(UsageError):
    """The user's own code failed.

    Attributes:
        frames: the user's part of the traceback, several lines, for debugging.
    """

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


@contextmanager
def own_code(doing: str) -> Iterator[None]:
    """Turn an exception of the user's code in this block into one line of `doing`, the exception and the place.

    This project's errors and interrupts pass unchanged. Output of the code goes to standard error, because standard
    output is for results.

    Raises:
        OwnCodeError: in place of the exception.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (TxlError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise failure(error, doing) from error


def failure(error: BaseException, doing: str) -> OwnCodeError:
    """Return an exception of the user's code as an error of this project: "DOING: EXCEPTION (FILE:LINE: SOURCE)"."""
    frames = users_frames(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"
    else:
        place = described(frames[-1]) if frames else ""
    shown = _misfit(error) or f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
    message = f"{doing}: {shown}" + (f" ({place})" if place else "") + _advice(error, bool(frames))
    return OwnCodeError(message, "".join(traceback.format_list(frames)))


def _advice(error: BaseException, inside: bool) -> str:
    """Return advice for an exception whose message is known; "" for any other.

    `inside` says whether the user's code is in the traceback.
    """
    if _FLOAT_INDICES.search(str(error)):
        return "; declare token ids as such: InputSpec(..., tokens=V)"
    if not inside and isinstance(error, TypeError) and _LACKS_ARGUMENTS.search(str(error)):
        return "; a state is an argument of forward where a StateSpec without attribute= declares it"
    return ""


def users_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Return frames of the user's files; if there are none, frames of packages other than torch and ONNX's."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if is_users(frame.filename)]
    return own or [frame for frame in frames if is_a_models(frame.filename)]


def is_users(file: str) -> bool:
    """Return whether a source file belongs to the user, not to Python, an installed package or this project."""
    return _package(file) == ""


def is_a_models(file: str) -> bool:
    """Return whether a source file is the user's, or of a package other than torch and ONNX's."""
    return _package(file) not in (None, *_CAPTURING)


@cache
def _package(file: str) -> str | None:
    """Return the installed package of a source file: "" for the user's own file, None for Python's files and ours."""
    path = Path(file).resolve()
    package = next((name for folder, name in pairwise(path.parts) if folder in _INSTALLED), "")
    pythons = not package and any(path.is_relative_to(place) for place in _PYTHONS)
    return None if file.startswith("<") or pythons or path.is_relative_to(_OURS) else package


def described(frame: traceback.FrameSummary) -> str:
    """Return a place in the user's code in one line, e.g. "model.py:12: x = x + 1"."""
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line or ''}".removesuffix(": ")


def in_the_step(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames inside the call of the user's step; frames of the script that called us are left out."""
    called = max((number for number, frame in enumerate(frames) if frame.filename == _CALLER), default=len(frames))
    return list(frames[called + 1 :])


def innermost(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the user's innermost frame, and, if that frame calls a package, the package's innermost frame."""
    model_frames = [frame for frame in frames if is_a_models(frame.filename)]
    own = [frame for frame in model_frames if is_users(frame.filename)]
    return [part[-1] for part in (own, model_frames) if part]


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost lines of frames in the form for a message: " (model.py:12: if x.sum() > 0:)"; "" for none.

    If that line calls a package, the package's own line follows: " (model.py:9: y = net(x), in net.py:33: x[x < 0] =
    0)".
    """
    lines = dict.fromkeys(described(frame) for frame in innermost(frames))
    return f" ({', in '.join(lines)})" if lines else ""


def place_in(trace: str) -> str:
    """Return the innermost lines, as `place_of` does, for a traceback that torch stores as text."""
    return place_of([traceback.FrameSummary(file, int(line), "") for file, line in _FRAME.findall(trace)])


def _misfit(error: BaseException) -> str | None:
    """Return a message for a failed `load_state_dict`; None for any other error."""
    _, misfit, what = str(error).partition("loading state_dict for ")
    return f"the weights do not fit {one_line(RuntimeError(what))}; give this module's own weights" if misfit else None
