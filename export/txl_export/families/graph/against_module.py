"""Compares an ONNX file that somebody else made with the module that it was made from.

The file takes the place of the module's bundle: the same chains, limits and gates judge it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from txl_report.schema.verification import Gate
from txl_runtime.bundle.axes import Axes
from txl_runtime.errors import UsageError, some
from txl_runtime.ladder import BISECT
from txl_runtime.listener import Listener
from txl_runtime.selftest import relative_difference

from txl_export.families.graph.matching import FileOptions, Step, Wiring, match
from txl_export.families.graph.standing_in import FileModel, running
from txl_export.families.graph.take.reading import read_foreign
from txl_export.families.own_module.loading import importable
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.reference import ModuleReference
from txl_export.families.own_module.sizes import fresh_states
from txl_export.families.own_module.sources import read_source, whose_code
from txl_export.families.own_module.spec import VALID, StepSpec
from txl_export.graphs.half import computes_in_half
from txl_export.proof.parity import Parity, failing
from txl_export.proof.verification import verify_model

SEQUENCES = 3
"""Number of sequences that run at the same time if the file takes any number."""


def verify_file(
    path: Path,
    module: Any,
    weights: str | Path | None,
    said: FileOptions,
    segments: int | None,
    listener: Listener,
) -> Parity:
    """Compare an ONNX file with a module over chained segments.

    Args:
        path: the file. ONNX Runtime runs it in a separate process with limits of time and memory.
        module, weights: the arguments of `read_source`.
        said: names in which the file differs from the module. `said.given` may also hold real inputs under the module's
            names.
        segments: the number of segments of the longest chain, or None.
        listener: receives progress and warnings.

    Raises:
        CheckError: the file cannot be this module's, or does not run where the module does.
        TxlError: the file cannot be read or run, or the module does not do what its specification says.
    """
    foreign = read_foreign(path)
    if whose := whose_code(module):
        listener.warn(f"{whose} is run on this machine")
    spec, name = read_source(module, weights)
    if absent := [entry.name for entry in spec.states if entry.initial is None]:
        raise UsageError(
            f"{name}: state {absent[0]} is absent before the first step, expected one that is there, because a file "
            "takes it in every step; say what it is given first (initial= of its StateSpec)"
        )
    samples, said = said.without({entry.name for entry in spec.inputs})
    logits = [replace(one, role=None if one.role == "logits" else one.role) for one in spec.output_specs]
    spec = replace(spec, outputs=logits, samples=samples or spec.samples)  # logits are compared as they are
    wiring = match(foreign, _step(spec), said)
    _tell(wiring, spec, listener)
    if half := computes_in_half(foreign.model.graph):
        listener.warn(f"{path.name} computes in float16, so fp16's limits judge it")
    with importable(module):
        lengths = [size for letter, size in wiring.fixed.items() if letter == "L"]
        plan = make_plan(spec, wiring.fixed.get("B", SEQUENCES), lengths, listener)
        listener.stage(f"open {path.name}")
        with running(foreign) as run:
            model = FileModel(plan, foreign, run, wiring, "fp16" if half else "fp32")
            parity = verify_model(
                lambda: model, ModuleReference(plan), name, spec.samples, segments, listener, odd=False
            )
    limit, defaults = BISECT[model.manifest.precision], foreign.model.graph.initializers
    starts = {one: defaults[port].const_value for one, port in wiring.takes.items() if port in defaults}
    parity = replace(parity, gates=(*parity.gates, *_first_states(plan, starts, limit)))
    return replace(parity, advice=_told(parity, model.engine.still, limit))


def _step(spec: StepSpec) -> Step:
    """Return the names, types and axes of a specification, for `match`."""
    takes = {one.name: (one.axes, one.module_dtype) for one in spec.inputs}
    takes |= {VALID: (Axes(("B",)), "int32")} if spec.lengths else {}
    for one in spec.states:
        open_rows = ["rows" if axis == one.grows else size for axis, size in enumerate(one.shape)]
        takes[one.name] = Axes(open_rows), one.dtype
    return Step("the module", takes, [one.name for one in spec.states], [one.name for one in spec.output_specs])


def _tell(wiring: Wiring, spec: StepSpec, listener: Listener) -> None:
    """Warn about states and inputs of the module that the file lacks."""
    for one in (*spec.inputs, *spec.states):
        if one.name not in wiring.takes:
            listener.warn(f"the file takes nothing for {one.name}")
    for one in spec.states:
        if wiring.takes.get(one.name, one.name) not in wiring.after:
            listener.warn(f"the file returns nothing for state {one.name}")


def _first_states(plan: Plan, starts: Mapping[str, Any], limit: float) -> list[Gate]:
    """Return a gate on the initial states that the file stores: they must equal the module's; [] if it stores none."""
    fresh, worst = fresh_states(plan.spec, plan.batch_size), 0.0
    for name, tensor in starts.items():
        if (own := fresh.get(name)) is not None:
            values = np.broadcast_to(tensor.numpy(), own.shape)
            worst = max(worst, relative_difference(values, own.numpy()))
    return [Gate("first state of the file max abs (relative)", worst, limit, worst <= limit)] if starts else []


def _told(parity: Parity, still: set[str], limit: float) -> str:
    """Return a sentence that names the segment where file and module first differ, and the likely cause.

    `still` holds the states that never changed in the file.
    """
    for chain in parity.chains:
        sides = (("output", chain.outputs, 1), ("state", chain.states, chain.chain.every))
        apart = {
            f"{kind} {name}": [at * every for at, most in enumerate(errors.tensor.most) if not (most or 0) <= limit]
            for kind, tensors, every in sides
            for name, errors in tensors.items()
        }
        parting = {key: places[0] for key, places in apart.items() if places}
        if not parting:
            continue
        at = min(parting.values())
        names = [key for key, place in parting.items() if place == at]
        if dead := sorted(name for name in still if f"state {name}" in parting):
            why = f"the file returns {some(dead)} as it was given"
        elif chain is not parity.chains[0]:
            why = "whole segments of the longest chain agree, so look at resets, at idle sequences and at lengths"
        elif at:
            why = "the first segments agree, so look at what is fed back, at its order, and at what counts steps"
        elif all(key.startswith("state ") for key in names):
            why = "the outputs agree, so look at what is returned as the next state"
        else:
            why = "a single step differs, so look at weights, inputs, arithmetic and modes"
        return f"they part first in segment {at + 1} of {chain.name}, at {some(names, 4)}: {why}"
    missed = [gate.name for gate in failing(parity.gates)]
    bits = "a segment that is repeated, or beside others, gives other bits; look for random numbers and mixed rows"
    why = bits if all(name.endswith("(bits)") for name in missed) else "see the table, whose errors are all small"
    return f"{some(missed)} failed: {why}" if missed else ""
