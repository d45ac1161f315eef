"""A function that loads a compiled step as a library, and the types of the arguments of the library's functions."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from txl_runtime.errors import BackendError, BundleError, one_line

VERSION = 3
"""Result of `txl_version` in libraries with the functions below."""

_FUNCTIONS = {
    "txl_version": (c_int, []),
    "txl_instructions": (c_char_p, []),
    "txl_open": (c_void_p, [c_void_p, c_int]),
    "txl_close": (None, [c_void_p]),
    "txl_set_product": (c_int, [c_void_p, *[c_int] * 4, c_void_p, c_int64, c_int64, c_void_p]),
    "txl_set_codes": (c_int, [c_void_p, *[c_int] * 4, c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "txl_set_nibbles": (c_int, [c_void_p, *[c_int] * 5, *[c_void_p] * 4]),
    "txl_set_vector": (c_int, [c_void_p, c_int, c_int, c_void_p, c_int]),
    "txl_set_positions": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
    "txl_set_cluster": (c_int, [c_void_p, *[c_int] * 4, c_void_p, c_void_p, c_void_p]),
    "txl_set_softmax": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]),
    "txl_step": (None, [c_void_p, c_int, c_int, *[c_void_p] * 4, POINTER(c_void_p), POINTER(c_void_p), c_void_p]),
    "txl_softmax": (None, [c_void_p, c_int, c_int, c_void_p, c_void_p]),
}
_WHOLE = (
    "vocabulary layers heads width head_width inner slots batch segment distances window segment_window single_steps "
    "step_window pre_norm final_norm activation cache bf16 clusters embedding div_val large_pages"
)


class Shape(ctypes.Structure):
    """Sizes and choices of a model, `struct txl_shape` of `source/model.h`."""

    _fields_ = [*((name, c_int32) for name in _WHOLE.split()), ("epsilon", c_float), ("scale", c_float)]


def open_library(path: Path, sha256: str = "") -> ctypes.CDLL:
    """Load a compiled step, which runs the file's code.

    Args:
        sha256: the hash that the code has to have; "" for any.

    Raises:
        BackendError: the file is no library of this system, or a step of a different version.
        BundleError: the file has a different hash.
    """
    todo = "build it again with `txl-deploy build`"
    try:
        code = path.read_bytes()
        if sha256 and hashlib.sha256(code).hexdigest() != sha256:
            raise BundleError(f"{path}: its SHA-256 is not its sidecar's, the file was altered; {todo}")
        library = _loaded(code)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendError(f"{path}: {one_line(error)}; expected a step for this machine; {todo}") from None
    if (version := library.txl_version()) != VERSION:
        raise BackendError(f"{path}: its functions are of version {version}, expected {VERSION}; {todo}")
    return library


@cache
def _loaded(code: bytes) -> ctypes.CDLL:
    """Load code from memory on Linux, elsewhere from a private copy.

    A file at its own path could be replaced between the check of its hash and the load. The system also takes a path
    that it has loaded before for the same library, so the file in memory stays open and keeps its number.
    """
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryDirectory(prefix="txl-native-") as folder:
            copy = Path(folder, "step.so")
            copy.write_bytes(code)
            return ctypes.CDLL(str(copy))
    number = os.memfd_create("txl-native")
    try:
        with os.fdopen(number, "wb", closefd=False) as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{number}")
    except OSError:
        os.close(number)
        raise
