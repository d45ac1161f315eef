"""A bundle beside an ONNX file that somebody else made: both stream the same segments, each with its own states.

What a bundle is usually compared with was made of the same weights as the bundle. Only a file from elsewhere tells that
these are not the weights that were meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from txl_report.schema.verification import Gate
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import CheckError, UsageError, some
from txl_runtime.ladder import BISECT
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Arrays

from txl_export.families.graph.find.naming import counted_alike, likeness, most_alike
from txl_export.families.graph.matching import Wiring
from txl_export.families.graph.standing_in import Wired, wired
from txl_export.families.graph.take.reading import Foreign, read_foreign
from txl_export.proof.input_source import InputSource, fitting
from txl_export.proof.parity import Parity

SEGMENTS = 200
"""That are streamed where nobody says how many."""


def verify_against(
    open_model: Callable[[], Model],
    path: Path,
    arrays: Arrays,
    pairs: Mapping[str, str],
    segments: int | None,
    heard: Listener,
) -> Parity:
    """Stream both, from an empty state; states of the file begin as zeros.

    Args:
        open_model: opens the bundle.
        path: the ONNX file. ONNX Runtime runs it in a process of its own, within bounds of time and memory.
        arrays: real inputs of the bundle by name; and by the file's names what every call of it is given besides, or
            first where it is a state.
        pairs: inputs of the file, and the outputs that are their next values.
        segments: how many; `SEGMENTS` without.
        heard: hears of progress.

    Raises:
        CheckpointError: the file cannot be read.
        UsageError: it does not run, or its inputs and outputs cannot be matched with the bundle's.
        BackendError: its process died, or its time is over.
    """
    model = open_model()
    manifest, count = model.manifest, segments or SEGMENTS
    known = {entry.name for entry in manifest.given}
    samples = {name: values for name, values in arrays.items() if name in known}
    _check(samples, manifest)
    others = {name: values for name, values in arrays.items() if name not in known}
    foreign = read_foreign(path)
    with wired(foreign) as file:
        return _compared(model, file, _wiring(foreign, manifest, others, pairs), samples, count, heard)


def _compared(model: Model, file: Wired, wiring: Wiring, samples: Arrays, count: int, heard: Listener) -> Parity:
    """What both return, segment by segment."""
    manifest, path, given, returns = model.manifest, file.path, wiring.given, wiring.returns
    source, stream = InputSource(manifest, samples, np.random.default_rng(0)), model.stream()
    worst, limit, first = dict.fromkeys(returns, 0.0), BISECT[manifest.precision], ""
    heard.stage(f"stream beside {path.name}", count)
    for segment in range(count):
        inputs = source.take(manifest.batch_size, manifest.segment_lengths[0])
        found = stream.run(inputs)
        try:
            theirs = file.run(replace(wiring, given=given), inputs)
        except CheckError as error:  # nothing was compared
            raise UsageError(str(error)) from None
        given = {**given, **{name: theirs[after] for name, after in wiring.pairs.items()}}
        for name, other in returns.items():
            try:
                apart = relative_difference(found[name], theirs[other].reshape(found[name].shape))
            except ValueError:
                raise UsageError(
                    f"{path}: {other} has the shape {list(theirs[other].shape)}, the bundle's {name} has "
                    f"{list(found[name].shape)}; export with as many sequences as the file takes (--batch-size)"
                ) from None
            worst[name] = max(worst[name], apart)
            first = first or (f"{name} in segment {segment + 1} of {count}" if apart > limit else "")
        heard.advance()
    gates = tuple(Gate(f"{name} max abs (relative)", value, limit, value <= limit) for name, value in worst.items())
    advice = f"they part first at {first}: in the first segment other weights or inputs, later other states"
    what = f"{path.name}, {count} segments of {manifest.segment_lengths[0]}"
    return Parity(
        model.backend.description, manifest.precision, what, (), None, gates, advice=advice, model_id=manifest.model_id
    )


def _check(samples: Arrays, manifest: Manifest) -> None:
    """Refuse samples of some inputs alone, or of another form."""
    if lacking := [entry.name for entry in manifest.given if samples and entry.name not in samples]:
        raise UsageError(f"--inputs has no {some(lacking)}, expected all inputs of the bundle or none; add it")
    for entry in manifest.given if samples else ():
        shape = samples[entry.name].shape
        if not fitting(shape, entry.axes, manifest.segment_lengths[0]):
            raise UsageError(f"--inputs has {entry.name} of {list(shape)}, expected {list(entry.shape)}; check it")


def _wiring(foreign: Foreign, manifest: Manifest, given: Arrays, pairs: Mapping[str, str]) -> Wiring:
    """What the file takes and returns by the bundle's names, and its states with their first values among `given`."""
    where, named = str(foreign.path), {*given, *pairs}
    takes = [port.name for port in foreign.inputs]
    gives = [port.name for port in foreign.outputs]
    ports = {port.name: port for port in foreign.inputs}
    ports |= {port.name: port for port in foreign.optional if port.name in named}
    if wrong := [*named - {*ports}, *{*pairs.values()} - {*gives}]:
        raise UsageError(
            f"{where}: has no {some(wrong)}, it takes {some(takes, 9)} and gives {some(gives, 9)}; "
            "check --state and --inputs"
        )
    inputs, outputs = [entry.name for entry in manifest.given], [entry.name for entry in manifest.outputs]
    earlier = [name for name in ports if name not in {*pairs, *inputs}]
    later = [name for name in gives if name not in {*pairs.values(), *outputs}]
    counted = counted_alike(earlier, later)
    alike = {(name, other): likeness(counted[name], other) for name in earlier for other in later}
    pairs = {**pairs, **most_alike(alike)}
    read = [name for name in ports if name not in {*given, *pairs}]
    returned = [name for name in gives if name in outputs or name not in pairs.values()]
    starts = {name: [n if isinstance(n, int) else manifest.batch_size for n in ports[name].shape] for name in pairs}
    return Wiring(
        _matched(where, read, inputs, {*read} <= {*inputs}, "takes"),
        {name: np.zeros(sizes) for name, sizes in starts.items()} | dict(given),
        pairs,
        returns=_matched(where, returned, outputs, {*outputs} <= {*returned}, "gives"),
    )


def _matched(where: str, theirs: list[str], ours: list[str], equal: bool, verb: str) -> dict[str, str]:
    """The bundle's names, and the file's for the same: equal ones, or the only one on each side."""
    if len(theirs) == len(ours) == 1:
        return {ours[0]: theirs[0]}
    if not equal:
        raise UsageError(
            f"{where}: {verb} {some(theirs, 9) or 'nothing'} beside states, the bundle has {some(ours, 9)}, "
            "expected the same names; give --state IN=OUT for each other state, and constants by --inputs FILE.npz"
        )
    return {name: name for name in ours if name in theirs}
