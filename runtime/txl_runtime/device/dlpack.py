"""Reading DLPack's description of someone else's array, so that tokens which are on the device already stay there.

Only what tokens need: int32, two dimensions, rows whose values stand side by side. The capsule is kept as long as the
memory is used; it gives the memory back to its owner when it goes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_runtime.device.cuda import Queue
from txl_runtime.device.interface import host_address
from txl_runtime.errors import UsageError, one_line
from txl_runtime.types import Ids


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor, the first member of both kinds of capsule's content before version 1."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


INT = 0
WIDTH = 4


@dataclass(frozen=True)
class DeviceTokens:
    """Token ids [b, T] in a device's memory.

    Attributes:
        address: of the first id.
        shape: b and T.
        pitch: bytes from one row to the next.
        owner: what keeps the memory alive.
    """

    address: int
    shape: tuple[int, int]
    pitch: int
    owner: Any

    def __getitem__(self, key: tuple[slice, slice]) -> DeviceTokens:
        """See `streaming.loop.Resident`; only [:, first:last] is asked for."""
        first, last, _ = key[1].indices(self.shape[1])
        return DeviceTokens(self.address + WIDTH * first, (self.shape[0], last - first), self.pitch, self.owner)


def lie_on(tokens: Any, device: tuple[int, int]) -> bool:
    """Whether tokens lie in the memory of this very device; kind and number are DLPack's."""
    try:
        where = getattr(tokens, "__dlpack_device__", None)
        return where is not None and hasattr(tokens, "__dlpack__") and tuple(map(int, where())) == device
    except Exception:  # an object with an opinion of its own: NumPy will say more of it
        return False


def device_tokens(tokens: Any, queue: int) -> DeviceTokens:
    """Tokens that lie on the device.

    `queue` is the handle of the queue that will read them. Whoever owns them makes it wait until they are written, so
    this is for whoever has its lock. Where the memory is, and how much of it, is the owner's word.

    Raises:
        UsageError: they are not int32 [b, T], or their owner does not hand them over.
    """
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        capsule = tokens.__dlpack__(stream=queue)
        tensor = _Tensor.from_address(get(capsule, b"dltensor"))
    except Exception as error:
        said = one_line(error)
        raise UsageError(
            f"tokens on the device are not handed over ({said}), expected a DLPack capsule; copy them"
        ) from error
    kind = (int(tensor.dtype.code), int(tensor.dtype.bits), int(tensor.dtype.lanes))
    shape = tuple(int(tensor.shape[i]) for i in range(min(tensor.ndim, 8))) if tensor.shape else ()
    if kind != (INT, 8 * WIDTH, 1) or tensor.ndim != 2 or len(shape) != 2 or min(shape) < 0:
        raise UsageError(
            f"tokens on the device are of type {kind} and shape {list(shape)}, expected int32 [b, T]; convert them"
        )
    strides = tuple(int(tensor.strides[i]) for i in range(2)) if tensor.strides else (shape[1], 1)
    if shape[1] > 1 and strides[1] != 1:
        raise UsageError(f"tokens on the device have strides {list(strides)}, expected rows in one piece; copy them")
    pitch = WIDTH * (strides[0] if shape[0] > 1 else shape[1])
    if pitch < WIDTH * shape[1]:
        raise UsageError(f"tokens on the device have strides {list(strides)}, expected rows apart; copy them")
    address = int(tensor.data or 0) + int(tensor.byte_offset)
    return DeviceTokens(address, (shape[0], shape[1]), pitch, (tokens, capsule))


def fetch_tokens(tokens: DeviceTokens, queue: Queue) -> Ids:
    """A copy on the host."""
    host = np.zeros(tokens.shape, np.int32)
    width = host.strides[0]
    queue.fetch(host_address(host), tokens.address, width, len(host), width, tokens.pitch)
    with queue.beside_records():  # another model may be recording in another thread
        queue.wait()
    return host
