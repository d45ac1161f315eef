"""Answers of CUDA's driver: statuses and their names, flags, and the structure that describes a copy of rows."""

from __future__ import annotations

import ctypes

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 2, 3, 100, 101
INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_STATE, ILLEGAL_ADDRESS = 201, 400, 401, 700
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, WRONG_THREAD, CAPTURED_EVENT, LAUNCH_FAILED = 900, 901, 908, 907, 719
NAMES = {
    INVALID_VALUE: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    OUT_OF_MEMORY: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    NOT_INITIALIZED: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    NO_DEVICE: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    INVALID_DEVICE: ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
    INVALID_CONTEXT: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    INVALID_HANDLE: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    ILLEGAL_STATE: ("CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"),
    ILLEGAL_ADDRESS: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    CAPTURE_UNSUPPORTED: (
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "operation not permitted when stream is capturing",
    ),
    CAPTURE_INVALIDATED: (
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "operation failed due to a previous error during capture",
    ),
    CAPTURED_EVENT: ("CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capture"),
    WRONG_THREAD: ("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture was not ended in the thread that began it"),
    LAUNCH_FAILED: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
}
HOST, DEVICE = 1, 2
NON_BLOCKING, NO_TIMING, SLEEPS = 1, 2, 1
GLOBAL, RELAXED, ACTIVE, INVALIDATED = 0, 2, 1, 2
MAX_PITCH = 2**31 - 1
MULTIPROCESSORS, INTEGRATED, MEMORY_KHZ, MEMORY_BITS, MAJOR, MINOR = 16, 18, 36, 37, 75, 76
Status = int


class MemoryCopy(ctypes.Structure):
    """CUDA_MEMCPY2D as cuda.h has it; whatever the caller calls its fields, they have to lie here."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("to_x", ctypes.c_size_t),
        ("to_y", ctypes.c_size_t),
        ("to_type", ctypes.c_int),
        ("to_host", ctypes.c_void_p),
        ("to_device", ctypes.c_uint64),
        ("to_array", ctypes.c_void_p),
        ("to_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Refused(Exception):
    """A function fails as the driver's does."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status
