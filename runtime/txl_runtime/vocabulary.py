"""Text to token ids and back. Plain JSON in a bundle; nothing in it is ever executed."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from txl_runtime.errors import BundleError

__all__ = ["Bytes", "Vocabulary", "decode_vocabulary", "read_vocabulary"]


class Vocabulary(Protocol):
    """Text to token ids and back."""

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids int32 [T] of a text."""
        ...

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """The text of token ids."""
        ...


class Bytes:
    """Every byte is a token."""

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids int32 [T] of a text."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens: NDArray[np.int32]) -> bytes:
        """The text of token ids."""
        return bytes(np.asarray(tokens, np.uint8))


class _Stored(msgspec.Struct):
    kind: str


def decode_vocabulary(data: bytes, vocab_size: int, source: str) -> Vocabulary:
    """A vocabulary from its JSON.

    Raises:
        BundleError: not a vocabulary, or not one of this many ids.
    """
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BundleError(f"{source}: {error}; expected a vocabulary; export the model again") from None
    if stored.kind != "bytes":
        raise BundleError(
            f"{source}: vocabulary of kind {stored.kind!r}, this version knows 'bytes'; upgrade txl-deploy"
        )
    if vocab_size != 256:
        raise BundleError(
            f"{source}: a byte vocabulary has 256 ids, the model has {vocab_size}; export the model again"
        )
    return Bytes()


def read_vocabulary(path: Path, vocab_size: int) -> Vocabulary:
    """A vocabulary from a file of a bundle; errors as `decode_vocabulary`."""
    try:
        return decode_vocabulary(path.read_bytes(), vocab_size, str(path))
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; expected a vocabulary; export the model again") from None
