"""A bundle, loaded: programs behind one engine, ready to be streamed."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle, Held, open_bundle
from txl_runtime.errors import BackendError, BundleError, TxlError, UsageError
from txl_runtime.streaming.checks import is_whole
from txl_runtime.streaming.loop import Backend, Loop
from txl_runtime.streaming.memory import initial_values
from txl_runtime.streaming.stream import Stream

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpu", "rtx", "tensorrt", "cuda")
ATTEMPTS = 5
"""How often a bundle is loaded anew that was replaced while it was being loaded."""


class Model:
    """A loaded bundle. Threads may share it; each needs a stream of its own.

    Attributes:
        bundle: its files.
        backend: the engine; `backend.description` says which.
        backend_notes: of "auto", why the backends that would be better do not run here.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: str = "auto",
        threads: int | None = None,
        update: str | None = None,
        lean: bool = False,
    ) -> None:
        if backend not in BACKENDS:
            raise BackendError(f"backend {backend!r} is unknown, expected one of {', '.join(BACKENDS)}")
        if threads is not None and (not is_whole(threads) or threads < 1):
            raise BackendError(f"threads is {threads!r}, expected a whole number of at least 1, or None for all cores")
        held = bundle.manifest.updates
        if update is not None and update not in held:
            raise UsageError(f"update is {update!r}, this bundle has programs for {', '.join(held)}; use one")
        self.bundle = bundle
        self._initial = initial_values(bundle)
        self.backend: Backend
        self.backend, self.backend_notes = _open(backend, bundle, update, threads, lean)
        for name, note in self.backend_notes.items():
            logger.info("backend %s is not taken: %s", name, note)

    def __repr__(self) -> str:
        m = self.manifest
        rows = f", M {m.memory_length}" if "fill" in m.counters else ""
        return f"<Model {m.model_id[:12]}: B {m.batch_size}, L {list(m.segment_lengths)}{rows}>"

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self.bundle.manifest

    @property
    def update(self) -> str:
        """The update rule of its memory."""
        return self.backend.update

    @property
    def vocab_size(self) -> int | None:
        """V, the number of token ids; None for a model that reads none."""
        return self.manifest.vocab_size or None

    @property
    def memory_length(self) -> int | None:
        """M, memory rows per layer; None for a model that has no memory rows."""
        return self.manifest.memory_length if "fill" in self.manifest.counters else None

    @property
    def batch_size(self) -> int:
        """B, the most sequences a stream can have."""
        return self.manifest.batch_size

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """L of the programs, largest first."""
        return self.manifest.segment_lengths

    @property
    def vocabulary(self) -> Vocabulary | None:
        """See `Bundle.vocabulary`."""
        return self.bundle.vocabulary()

    def stream(self, batch_size: int | None = None) -> Stream:
        """Open b sequences with fresh memory; B of them unless said otherwise.

        Raises:
            UsageError: more sequences than the bundle was exported for.
        """
        b = self.batch_size if batch_size is None else batch_size
        if not is_whole(b) or not 1 <= b <= self.batch_size:
            raise UsageError(
                f"batch_size is {b}, expected 1 … {self.batch_size}; export with --batch-size for more sequences"
            )
        if self.manifest.joint and b < self.batch_size:
            raise UsageError(
                f"batch_size is {b}, expected {self.batch_size}, because this model's sequences influence one another; "
                f"export it with --batch-size {b} for so many"
            )
        return Stream(self.manifest, self.open_loop(), self.update, int(b))

    def open_loop(self) -> Loop:
        """A loop of B fresh sequences, for whoever needs more of the engine than a stream shows."""
        return self.backend.open_loop(self.manifest, self._initial)


def load(
    path: str | Path,
    backend: str = "auto",
    threads: int | None = None,
    verify_files: bool = True,
    update: str | None = None,
    lean: bool = False,
) -> Model:
    """Load a bundle.

    A bundle that is replaced in the meantime is loaded anew, so that a model is always of one bundle.

    Args:
        path: the bundle's folder.
        backend: cpu, cuda (ONNX Runtime), tensorrt or rtx (engines that `txl-deploy build` made); auto for the best
            that runs here, `Model.backend_notes` says why others do not.
        threads: of the engine; None for one per physical core.
        verify_files: check every file's SHA-256 (sizes are always checked).
        update: rolled or ring, which of a bundle's programs to run; None for the best the backend has (a ring, with
            ONNX Runtime from 1.25 on).
        lean: leave the weights where the file is mapped into memory instead of keeping a copy laid out for speed.

    Raises:
        BundleError: the bundle is missing, altered, inconsistent or too new, or it was replaced again and again.
        BackendError: the engine is not installed or cannot run it.
        UsageError: the bundle has no programs of that update rule.
    """
    started = time.monotonic()
    for _ in range(ATTEMPTS):
        with Held(path) as held:
            try:
                model = Model(open_bundle(path, verify_files), backend, threads, update, lean)
            except TxlError:
                if not held.replaced:
                    raise
            else:
                if not held.replaced:
                    seconds = time.monotonic() - started
                    logger.info("loaded %s in %.2f s: %r, %s", path, seconds, model, model.backend.description)
                    return model
        logger.warning("%s was replaced while it was being loaded; loading it anew", path)
    raise BundleError(
        f"{path}: was replaced {ATTEMPTS} times while it was being loaded, expected it to stay for as long as a load "
        "takes; load it again when whoever replaces it has finished"
    )


def _open(
    name: str, bundle: Bundle, update: str | None, threads: int | None, lean: bool
) -> tuple[Backend, dict[str, str]]:
    """The backend that was asked for, or the best that opens the bundle; and why others were not taken."""
    notes: dict[str, str] = {}
    if name != "cpu":
        from txl_runtime.device import choosing

        if name != "auto":
            return choosing.open_device(name, bundle, update), notes
        device, notes = choosing.choose_device(bundle, update)
        if device is not None:
            return device, notes
    from txl_runtime.host.backend import open_host

    try:
        return open_host(bundle, update, threads, lean), notes
    except BackendError as error:
        raise BackendError("; ".join([str(error), *(f"{name}: {reason}" for name, reason in notes.items())])) from None
