"""The recurrent state of streams, apart from any graph: taken, stored, put back."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import TxlError, UsageError

__all__ = ["StreamState"]

FORMAT = "txl-deploy.state/1"


@dataclass(frozen=True)
class StreamState:
    """A copy of the memory of b streams, bound to the model it came from.

    Attributes:
        model_id: of the bundle; the state fits every bundle of that model with the same form of memory.
        fill: int32 [b], memory rows that each stream has filled.
        memory: as `Stream.memory()` gives it, oldest row first, shorter streams zero-padded on the left.
        head: int32 [b], where each stream stood in its ring: no part of the function, but of its rounding.
    """

    model_id: str
    fill: NDArray[np.int32]
    memory: dict[str, NDArray[np.float32]]
    head: NDArray[np.int32] | None = None

    @property
    def batch_size(self) -> int:
        """b, the number of streams."""
        return int(self.fill.shape[0])

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; an existing one is replaced in one step.

        Raises:
            TxlError: the file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save

        target = Path(path)
        heads = {} if self.head is None else {"head": self.head}
        data = save(
            {"fill": self.fill, **heads, **{name: np.ascontiguousarray(rows) for name, rows in self.memory.items()}},
            metadata={"format": FORMAT, "model_id": self.model_id},
        )
        partial = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            partial.write_bytes(data)
            partial.replace(target)
        except (OSError, SafetensorError) as error:
            raise TxlError(f"{target}: the state cannot be written ({error}); choose another place") from None
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> StreamState:
        """Read what `save` wrote.

        Raises:
            UsageError: the file is missing or is not a saved state.
        """
        from safetensors import SafetensorError, safe_open

        source = Path(path)
        if not source.is_file():
            raise UsageError(f"{source}: no such file, expected a saved state; StreamState.save writes one")
        try:
            with safe_open(source, framework="numpy") as stored:
                facts = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{source}: {error}; expected a saved state; StreamState.save writes one") from None
        fill = tensors.pop("fill", None)
        if facts.get("format") != FORMAT or fill is None or fill.ndim != 1 or fill.dtype != np.int32:
            raise UsageError(f"{source}: another kind of file, expected a saved state ({FORMAT})")
        head = tensors.pop("head", None)
        if head is not None and (head.shape != fill.shape or head.dtype != np.int32):
            raise UsageError(
                f"{source}: its head is {head.dtype} {list(head.shape)}, expected int32 {list(fill.shape)}"
            )
        return cls(facts.get("model_id", ""), fill, tensors, head)
