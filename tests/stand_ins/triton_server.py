"""Stands in for `triton_python_backend_utils`, as far as the models in packages use it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


@dataclass
class TritonError(Exception):
    INVALID_ARG, INTERNAL, CANCELLED, UNAVAILABLE, NOT_FOUND = 3, 1, 9, 6, 2
    message: str
    code: int = 1


@dataclass
class Tensor:
    title: str
    array: np.ndarray

    def name(self) -> str:
        return self.title

    def as_numpy(self) -> np.ndarray:
        return self.array

    def to_dlpack(self) -> Any:
        return self.array

    @staticmethod
    def from_dlpack(name: str, array: Any) -> Tensor:
        return Tensor(name, array)


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        assert self.error is None, self.error
        return {tensor.title: tensor.array for tensor in self.output_tensors}


class Sender:
    """Keeps what is sent; the last has to be marked."""

    def __init__(self) -> None:
        self.sent: list[InferenceResponse] = []
        self.ended = self.cancelled = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended
        if response is not None:
            self.sent.append(response)
        self.ended = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return self.cancelled


@dataclass
class Request:
    name: Any
    inputs: Mapping[str, np.ndarray]
    wanted: Collection[str] = ()
    start: bool = False
    end: bool = False
    sender: Sender = field(default_factory=Sender)

    def correlation_id(self) -> Any:
        return self.name

    def flags(self) -> int:
        return self.start * TRITONSERVER_REQUEST_FLAG_SEQUENCE_START + self.end * TRITONSERVER_REQUEST_FLAG_SEQUENCE_END

    def requested_output_names(self) -> set[str]:
        return set(self.wanted)

    def get_response_sender(self) -> Sender:
        return self.sender


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return Tensor(name, request.inputs[name]) if name in request.inputs else None
