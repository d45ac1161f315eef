"""Compares a bundle with an ONNX file that it was not made from: both stream the same segments, with their own states.

A bundle's usual reference has the bundle's own weights. Only a file from elsewhere can show that these are the wrong
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from txl_report.schema.verification import Gate
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.ladder import BISECT
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array, Arrays

from txl_export.families.graph.matching import FileOptions, Step, Wiring, match
from txl_export.families.graph.standing_in import running
from txl_export.families.graph.take.reading import Foreign, read_foreign
from txl_export.proof.input_source import InputSource, fitting
from txl_export.proof.parity import Parity

SEGMENTS = 200
"""Number of segments that are streamed if --segments is not given."""


def verify_beside(
    open_model: Callable[[], Model], path: Path, said: FileOptions, segments: int | None, listener: Listener
) -> Parity:
    """Stream the bundle and the file, with as many sequences as the file takes, from the initial state on.

    A state of the file begins like the bundle's state of the same name and shape; without such a state, with zeros.

    Args:
        open_model: opens the bundle.
        path: the ONNX file. ONNX Runtime runs it in a separate process with limits of time and memory.
        said: names in which the file differs from the bundle. `said.given` may also hold real inputs under the bundle's
            names.
        segments: the number of segments; None for `SEGMENTS`.
        listener: receives progress.

    Raises:
        CheckpointError: the file cannot be read.
        UsageError: the file cannot be opened, or one of its inputs or outputs has no counterpart in the bundle.
        CheckError: the file takes other types or sizes than the bundle, or does not run with the bundle's inputs.
        BackendError: the process died or ran out of time.
    """
    model, foreign = open_model(), read_foreign(path)
    manifest = model.manifest
    takes = {one.name: (one.axes, str(one.dtype)) for one in manifest.given}
    step = Step(
        "the bundle", takes, [one.name for one in manifest.states], [one.name for one in manifest.outputs], more=True
    )
    samples, said = said.without(takes)
    _check(samples, manifest)
    wiring = match(foreign, step, said)
    count, rows = segments or SEGMENTS, wiring.fixed.get("B", manifest.batch_size)
    length, stream = wiring.fixed.get("L", manifest.segment_lengths[0]), model.stream(rows)
    firsts = _firsts(foreign, wiring, said, stream.state(), rows)
    source = InputSource(manifest, samples, np.random.default_rng(0))
    worst, limit, first = dict.fromkeys(wiring.returns, 0.0), BISECT[manifest.precision], ""
    with running(foreign) as run:
        listener.stage(f"stream beside {path.name}", count)
        for segment in range(count):
            inputs = source.take(rows, length)
            results = stream.run(inputs)
            theirs = run({**wiring.feeds(inputs), **firsts})
            firsts = {port: theirs[after] for port, after in wiring.after.items()}
            for output in manifest.outputs:
                name, other = output.name, theirs[wiring.returns[output.name]]
                if other.shape != results[name].shape:
                    raise CheckError(
                        f"{path}: gives {wiring.returns[name]} of the shape {list(other.shape)}, expected the bundle's "
                        f"{name} {list(results[name].shape)}; look whether a size was fixed when it was exported"
                    )
                if output.role == "logprobs":  # the file may return logits
                    other = torch.from_numpy(other).log_softmax(-1).numpy()
                apart = relative_difference(results[name], other)
                worst[name] = max(worst[name], apart)
                first = first or (f"{name} in segment {segment + 1} of {count}" if apart > limit else "")
            listener.advance()
    gates = tuple(Gate(f"{name} max abs (relative)", value, limit, value <= limit) for name, value in worst.items())
    advice = (
        f"they part first at {first}: in the first segment other weights or inputs, later other states, or weights "
        "that differ a little"
    )
    what = f"{path.name}, {count} segments of {length}"
    return Parity(
        model.backend.description, manifest.precision, what, (), None, gates, advice=advice, model_id=manifest.model_id
    )


def _firsts(file: Foreign, wiring: Wiring, options: FileOptions, own: Arrays, rows: int) -> dict[str, Array]:
    """Return initial values, by the file's names, of states for which neither the file nor `options` has values."""
    firsts = dict[str, Array]()
    for port in [one for one in file.inputs if one.name in wiring.after and one.name not in options.given]:
        zeros = np.zeros([size if isinstance(size, int) else rows for size in port.shape])
        like = own.get(options.rename.get(port.name, port.name), zeros)
        firsts[port.name] = like if like.shape == zeros.shape else zeros
    return firsts


def _check(samples: Arrays, manifest: Manifest) -> None:
    """Refuse samples for only some of the inputs, or of a wrong shape."""
    if lacking := [entry.name for entry in manifest.given if samples and entry.name not in samples]:
        raise UsageError(f"--inputs has no {some(lacking)}, expected all inputs of the bundle or none; add it")
    for entry in manifest.given if samples else ():
        shape = samples[entry.name].shape
        if not fitting(shape, entry.axes, manifest.segment_lengths[0]):
            raise UsageError(f"--inputs has {entry.name} of {list(shape)}, expected {list(entry.shape)}; check it")
