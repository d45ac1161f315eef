"""A bundle, loaded: programs behind one engine, ready to be streamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle, open_bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.bundle.vocabulary import Vocabulary, read_vocabulary
from txl_runtime.errors import BundleError, UsageError
from txl_runtime.streaming.loop import Backend, check_choice, open_backend
from txl_runtime.streaming.stream import Stream
from txl_runtime.update_rules import usable_updates

if TYPE_CHECKING:
    from txl_runtime.device.backend import DeviceBackend

__all__ = ["Model", "load"]


class Model:
    """A loaded bundle. Threads may share it; each needs a stream of its own.

    Attributes:
        backend: the engine; `backend.description` says which.
        device: the same where memories live on a device, None on the CPU.
        backend_notes: of "auto", why the backends that would be better do not run here.
        update, kind: the update rule of its memory, and what its segment programs return.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: str = "auto",
        threads: int | None = None,
        update: str | None = None,
        lean: bool = False,
    ) -> None:
        check_choice(backend, threads)
        self.bundle = bundle
        _check_update(bundle.manifest, update)
        # What a memory row is before anything was seen, per state tensor; broadcasts over streams and rows.
        self.initial = _initial_rows(bundle)
        self.backend: Backend
        self._by_length: dict[int, Program] = {}
        device, self.backend_notes = _device(backend, bundle, update)
        self.device = device
        if device is not None:
            self.update, self.kind, self.backend = device.update, device.kind, device
            self._programs = [program for program in device.programs if program.kind == device.kind]
            return
        self.update = update or usable_updates(bundle.manifest.updates)[0]
        segments = [program for program in bundle.manifest.programs if program.update == self.update]
        self.kind = segments[0].kind
        self._programs = sorted(segments, key=lambda program: program.segment_length)
        softmax = [program for program in bundle.manifest.programs if program.update == "none"]
        used = (*segments, *(softmax if self.kind == "hidden" else ()))
        self.backend = open_backend(bundle, used, threads, lean)

    def __repr__(self) -> str:
        m = self.manifest
        return f"<Model {m.model_id[:12]}: B {m.batch_size}, L {list(m.segment_lengths)}, M {m.memory_length}>"

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self.bundle.manifest

    @property
    def vocab_size(self) -> int:
        """V, the number of token ids."""
        return self.manifest.config.vocab_size

    @property
    def memory_length(self) -> int:
        """M, memory rows per layer."""
        return self.manifest.memory_length

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
        """Text to token ids and back, if the checkpoint came with a vocabulary."""
        name = self.manifest.vocabulary
        return read_vocabulary(self.bundle.file(name), self.vocab_size) if name else None

    def stream(self, batch_size: int | None = None) -> Stream:
        """Open b sequences with fresh memory; B of them unless said otherwise.

        Raises:
            UsageError: more sequences than the bundle was exported for.
        """
        b = self.batch_size if batch_size is None else batch_size
        if isinstance(b, bool) or not isinstance(b, int | np.integer) or not 1 <= b <= self.batch_size:
            raise UsageError(
                f"batch_size is {b}, expected 1 … {self.batch_size}; export with --batch-size for more sequences"
            )
        return Stream(self, int(b)) if self.device is None else self.device.stream(self, int(b))

    def program(self, length: int) -> Program:
        """The smallest program that holds a segment of that many tokens."""
        found = self._by_length.get(length)
        if found is None:
            found = next(program for program in self._programs if program.segment_length >= length)
            self._by_length[length] = found
        return found


def load(
    path: str | Path,
    backend: str = "auto",
    threads: int | None = None,
    verify_files: bool = True,
    update: str | None = None,
    lean: bool = False,
) -> Model:
    """Load a bundle.

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
        BundleError: the bundle is missing, altered, inconsistent or too new.
        BackendError: the engine is not installed or cannot run it.
        UsageError: the bundle has no programs of that update rule.
    """
    return Model(open_bundle(path, verify_files), backend, threads, update, lean)


def _device(name: str, bundle: Bundle, update: str | None) -> tuple[DeviceBackend | None, dict[str, str]]:
    """The device's backend that was asked for or found, if any; and why others were not taken."""
    if name == "cpu":
        return None, {}
    from txl_runtime.device.choosing import choose_device, open_device

    return choose_device(bundle, update) if name == "auto" else (open_device(name, bundle, update), {})


def _check_update(manifest: Manifest, asked: str | None) -> None:
    if asked is not None and asked not in manifest.updates:
        raise UsageError(f"update is {asked!r}, this bundle has programs for {', '.join(manifest.updates)}; use one")


def _initial_rows(bundle: Bundle) -> dict[str, NDArray[np.float32]]:
    """One row per state tensor: zero, or what the weight file says a row of zeros is projected to."""
    states = bundle.manifest.states
    stored = {state.initial for state in states if state.initial}
    rows = bundle.weights(*stored) if stored else {}
    initial = {state.name: rows[state.initial] if state.initial else np.zeros((), np.float32) for state in states}
    for state in states:  # of every update rule: the row is the same
        row = initial[state.name]
        shape = tuple(size for axis, size in enumerate(state.shape) if axis not in (0, state.axis))
        if state.initial and (row.dtype != np.float32 or row.shape != shape):
            raise BundleError(
                f"{bundle.path}: {state.initial} is {row.dtype} {list(row.shape)}, expected float32 {list(shape)}, "
                f"one row of {state.name}; export the model again"
            )
    return initial
