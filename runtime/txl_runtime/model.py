"""A loaded bundle: programs that one engine has opened, and the streams that run them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import ArrayLike, NDArray

from txl_runtime.bundle.folder import undisturbed
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle, bundle_path, read_bundle
from txl_runtime.errors import BackendError, BundleError, UsageError
from txl_runtime.host.backend import open_host
from txl_runtime.host.huge_pages import in_huge_pages
from txl_runtime.streaming.checks import check_flag, is_whole, shown
from txl_runtime.streaming.inputs import check_memory_length
from txl_runtime.streaming.loop import Backend, Closed, Loop
from txl_runtime.streaming.state import initial_values
from txl_runtime.streaming.stream import Stream

if TYPE_CHECKING:
    from txl_runtime.bundle.vocabulary import Vocabulary
    from txl_runtime.sandbox.process import Bounds
    from txl_runtime.streaming.snapshot import StreamState
    from txl_runtime.streaming.state import RowState

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpu", "rtx", "tensorrt", "cuda", "native")
"""Names of backends that `load` accepts."""
FORMS = ("fast", "plain")
"""Names of forms of graphs that `load` accepts."""


class Model:
    """A loaded bundle. Threads may share a model; each thread needs its own stream.

    `with txl_runtime.load(path) as model:` closes the model at the end, as `close` does.

    Attributes:
        bundle: the bundle's files.
        backend: the opened backend; `backend.description` names the engine.
        backend_notes: for backend "auto", the reason why each faster backend does not run here, by name.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: str = "auto",
        threads: int | None = None,
        update: str | None = None,
        lean: bool = False,
        forms: str = "fast",
        trial: bool | Bounds = False,
        huge_pages: bool = True,
    ) -> None:
        if not isinstance(backend, str) or backend not in BACKENDS:
            raise BackendError(f"backend {shown(backend)} is unknown, expected one of {', '.join(BACKENDS)}")
        if threads is not None and (not is_whole(threads) or not 1 <= threads <= 1024):
            raise BackendError(
                f"threads is {shown(threads)}, expected a whole number of 1 … 1024, or None for all cores"
            )
        if not isinstance(forms, str) or forms not in FORMS:
            raise UsageError(f"forms is {shown(forms)}, expected one of {', '.join(FORMS)}")
        if trial is not False and backend not in ("auto", "cpu"):
            raise UsageError(
                f"backend is {backend}, and a trial is for the CPU alone: expected auto or cpu; leave one of both out"
            )
        lean, held = check_flag(lean, "lean"), bundle.manifest.updates
        huge_pages = check_flag(huge_pages, "huge_pages") and not lean
        if update is not None and (not isinstance(update, str) or update not in held):
            raise UsageError(f"update is {shown(update)}, this bundle has programs for {', '.join(held)}; use one")
        self.bundle, self._threads = bundle, threads
        self._streams = WeakSet[Stream]()
        self._initial = initial_values(bundle)
        self.backend: Backend
        self.backend, self.backend_notes = _open(backend, bundle, update, threads, lean, forms, trial, huge_pages)
        for name, note in self.backend_notes.items():
            logger.info("backend %s is not taken: %s", name, note)

    def __repr__(self) -> str:
        m = self.manifest
        rows = f", M {m.memory_length}" if m.can.count_rows else ""
        return f"<Model {m.model_id[:12]}: B {m.batch_size}, L {list(m.segment_lengths)}{rows}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the memory of the model and its streams, on the host and a device: weights, states, engines.

        Afterwards the model, its streams and its sessions raise UsageError; the manifest stays readable. A step that is
        running in a different thread keeps its memory until it ends. A second call does nothing.
        """
        self.backend = cast("Backend", Closed())
        for stream in list(self._streams):
            stream._close()

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @property
    def update(self) -> str:
        """The update rule of the state, e.g. "ring"."""
        return self.backend.update

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids; None for a model without tokens."""
        return self.manifest.vocab_size or None

    @property
    def memory_length(self) -> int | None:
        """The maximum number of memory rows per layer; None for a model without memory rows."""
        return self.manifest.memory_length if self.manifest.can.count_rows else None

    @property
    def batch_size(self) -> int:
        """The maximum number of sequences of a stream."""
        return self.manifest.batch_size

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Segment lengths of the programs, largest first."""
        return self.manifest.segment_lengths

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary, read at the first use; None if the bundle has none. If the folder may be replaced, use it
        right after loading.
        """
        return self.bundle.vocabulary()

    def stream(self, batch_size: int | None = None, memory_length: int | None = None) -> Stream:
        """Open a stream whose sequences are in their first state.

        Args:
            batch_size: number of sequences; None for the bundle's batch size.
            memory_length: maximum number of memory rows that a sequence keeps; None for the bundle's memory length.

        Raises:
            UsageError: a number is out of range for the bundle, or the model counts no memory rows.
        """
        b = self.batch_size if batch_size is None else batch_size
        if not is_whole(b) or not 1 <= b <= self.batch_size:
            raise UsageError(
                f"batch_size is {shown(b)}, expected 1 … {self.batch_size}; export with --batch-size for more sequences"
            )
        if not self.manifest.can.run_fewer and b < self.batch_size:
            raise UsageError(
                f"batch_size is {b}, expected {self.batch_size}, because this model's sequences influence one another; "
                f"export it with --batch-size {b} for so many"
            )
        manifest = self.backend.fitting(self.manifest, int(b))
        loop = self.backend.open_loop(manifest, self._initial)
        stream = Stream(manifest, loop, self.update, int(b), lambda: self.vocabulary)
        if memory_length is not None:
            rows = check_memory_length(memory_length, manifest)
            loop.limit(np.arange(manifest.batch_size), rows)
            stream.limited = rows < manifest.memory_length
        self._streams.add(stream)
        return stream

    def rank(
        self, context: ArrayLike, hypotheses: Sequence[ArrayLike], state: RowState | StreamState | None = None
    ) -> NDArray[np.float64]:
        """Return the costs of n hypotheses that continue the same context; the most probable hypothesis costs least.

        Any number of hypotheses of any lengths is allowed; as many as the batch size run side by side. A hypothesis's
        cost does not depend on the other hypotheses, except for rounding.

        Args:
            context: tokens [T], at least one, or text, which precedes each hypothesis.
            hypotheses: tokens [T] or a text for each; a hypothesis without tokens costs 0.
            state: state of one sequence before the context, from `Stream.take` or a file; None for the first state. The
                call does not change it.

        Returns:
            float64 [n]: the negative log-likelihood of each hypothesis, in nats, summed over its tokens.

        Raises:
            UsageError: tokens or the state do not fit the model, or the model cannot score tokens.

        Example:
            >>> model = txl_runtime.load("samples/tiny.txl")
            >>> int(model.rank("the licen", ["se", "zq"]).argmin())
            0
        """
        from txl_runtime.streaming.ranking import rank

        return rank(self.stream, self.manifest, context, hypotheses, state)

    def open_loop(self) -> Loop:
        """Return a loop of fresh sequences, for measurements and tests: it gives access to the engine's buffers and
        memory.
        """
        return self.backend.open_loop(self.manifest, self._initial)


def load(
    path: str | Path,
    backend: str = "auto",
    threads: int | None = None,
    verify_files: bool = True,
    update: str | None = None,
    lean: bool = False,
    forms: str = "fast",
    trial: bool | Bounds = False,
    huge_pages: bool = True,
) -> Model:
    """Load a bundle.

    If the folder is replaced during loading, an error is raised, so that a model never mixes files of two bundles.

    Args:
        path: the bundle's folder.
        backend: cpu, cuda (ONNX Runtime), tensorrt, rtx or native (engines that `txl-deploy build` made); auto for the
            best backend that runs here (`Model.backend_notes` says why better ones do not). auto takes native only if
            this user built its engine.
        threads: the engine's threads, 1 … 1024; None for one per physical core.
        verify_files: whether to check every file's SHA-256 (sizes are always checked).
        update: rolled or ring, the update rule of the programs to run; None for the fastest that the backend supports
            (ring, with ONNX Runtime 1.25 or newer).
        lean: use the weights directly in the memory-mapped file instead of a copy laid out for speed.
        forms: fast or plain. fast, on the CPU: the loop instead of the graph keeps the states of idle sequences, with
            the same bits. plain: the bundle's graphs are used unchanged.
        trial: for a stranger's bundle, on the CPU only: open the graphs in a limited process before they are opened
            here, and run each new combination of sizes there first. True allows 512 MiB plus 64 bytes for each byte of
            the weight file, 30 s of processor time and 5 minutes of wall-clock time. For different limits give
            `txl_runtime.sandbox.process.Bounds(memory, processor_seconds, seconds)`. Only Linux enforces the first two.
        huge_pages: put the CPU's weights into large pages, on Linux, if they have 32 MiB or more, but not in a trial.
            This takes 0.1 to 0.2 s of processor time per 100 MB, and no memory; the log says how much was moved.

    Raises:
        BundleError: the bundle is missing, altered, inconsistent or too new, it was replaced during loading, or a trial
            failed. With `trial`, later calls that run a segment of new sizes may also raise it.
        BackendError: the engine is not installed or cannot run the bundle.
        UsageError: the bundle has no programs of that update rule, or `trial` is used with a device's backend.
    """
    started, verify_files = time.monotonic(), check_flag(verify_files, "verify_files")
    model = undisturbed(
        bundle_path(path),
        lambda folder: Model(
            read_bundle(folder, verify_files), backend, threads, update, lean, forms, trial, huge_pages
        ),
    )
    seconds = time.monotonic() - started
    logger.info("loaded %s in %.2f s: %r, %s", path, seconds, model, model.backend.description)
    return model


def _open(
    name: str,
    bundle: Bundle,
    update: str | None,
    threads: int | None,
    lean: bool,
    forms: str,
    trial: bool | Bounds,
    huge_pages: bool,
) -> tuple[Backend, dict[str, str]]:
    """Return (the named backend, or for "auto" the best backend that opens the bundle; by name, the reason why each
    better backend does not).
    """
    notes: dict[str, str] = {}
    if trial is not False:
        notes = {} if name == "cpu" else dict.fromkeys(BACKENDS[2:], "a trial runs on the CPU alone")
    elif name == "native":
        from txl_runtime.native.opening import open_native

        return open_native(bundle, update, threads, lean, huge_pages), notes
    elif name != "cpu":
        from txl_runtime.device import choosing

        if name != "auto":
            return choosing.open_device(name, bundle, update), notes
        device, notes = choosing.choose_device(bundle, update)
        if device is not None:
            return device, notes
        step, reason = _own_step(bundle, update, threads, lean, huge_pages)
        if step is not None:
            return step, notes
        notes["native"] = reason
    try:
        with in_huge_pages() if huge_pages else nullcontext():
            return open_host(bundle, update, threads, lean, forms, trial), notes
    except BackendError as error:
        raise BackendError("; ".join([str(error), *(f"{name}: {reason}" for name, reason in notes.items())])) from None


def _own_step(
    bundle: Bundle, update: str | None, threads: int | None, lean: bool, huge_pages: bool
) -> tuple[Backend | None, str]:
    """Return (the backend "native", "") if this user compiled the bundle's step on this machine; else (None, the
    reason).
    """
    from txl_runtime.native import opening

    if reason := opening.missing(bundle, update, lean):
        return None, reason
    try:
        return opening.open_native(bundle, update, threads, lean, huge_pages, own=True), ""
    except (BackendError, BundleError) as error:
        return None, str(error)
