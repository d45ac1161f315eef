"""What a process that scores does: it loads the bundle, then answers batches until its parent is gone.

Messages are msgpack: a `Ready` first; for every list of `Unit` the shares of it that are done, then its `Outcome`s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process

import msgspec
from msgspec import Struct
from txl_runtime.bundle.manifest import Manifest

from txl_deploy.corpora.documents import Unit


class Settings(Struct, frozen=True, kw_only=True):
    """What a process loads; see `txl_runtime.load`.

    Attributes:
        bundle: the path of the bundle, as messages name it.
        place: the whole path as bytes, because `bundle` escapes what is no UTF-8 and the process stands elsewhere; None
            where `bundle` is the path itself.
    """

    bundle: str
    place: bytes | None = None
    backend: str = "auto"
    threads: int | None = 1


class Ready(Struct, frozen=True, kw_only=True):
    """What a process says of the model that it has loaded, or why there is none."""

    model: tuple[str, str] = ("", "")
    error: str | None = None


def identity(manifest: Manifest) -> tuple[str, str]:
    """The model, and its weights as they are stored: two exports of it to int8 may quantise different ones."""
    return manifest.model_id, manifest.files[manifest.weights].sha256


def work(connection: Connection, settings: bytes) -> None:
    """Load the bundle and score what comes, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _answer(connection, msgspec.msgpack.decode(settings, type=Settings))


def _answer(connection: Connection, settings: Settings) -> None:
    from txl_runtime.errors import TxlError
    from txl_runtime.model import load

    from txl_deploy.corpora.scoring import Scorer

    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Unit])
    try:
        place = settings.bundle if settings.place is None else os.fsdecode(settings.place)
        model = load(place, settings.backend, settings.threads)
        scorer = Scorer(model)
    except (TxlError, OSError, MemoryError) as error:
        connection.send_bytes(encoder.encode(Ready(error=f"{error}" or type(error).__name__)))
        return
    connection.send_bytes(encoder.encode(Ready(model=identity(model.manifest))))
    while True:
        units = decoder.decode(connection.recv_bytes())
        outcomes = scorer.score(units, lambda share: connection.send_bytes(encoder.encode(share)))
        connection.send_bytes(encoder.encode(outcomes))


def _end_with_parent() -> None:
    """A parent that dies, however it dies, takes this process along, also in the middle of a batch."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
