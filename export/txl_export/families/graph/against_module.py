"""An ONNX file that somebody else made, proven against the module that it was made of.

Chains, limits and gates are those by which a bundle of the module is judged; the file stands in for that bundle.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from txl_report.schema.verification import Gate
from txl_runtime.errors import CheckError, TxlError, UsageError, some
from txl_runtime.ladder import float32_limit
from txl_runtime.listener import Listener
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array, Arrays

from txl_export.families.graph.find.naming import kinship
from txl_export.families.graph.matching import ADVICE, Wiring, way_in, way_out
from txl_export.families.graph.standing_in import FileModel, Wired, wired
from txl_export.families.graph.take.reading import read_foreign
from txl_export.families.own_module.loading import importable
from txl_export.families.own_module.module_call import Eager
from txl_export.families.own_module.plan import Plan, make_plan
from txl_export.families.own_module.reference import ModuleReference
from txl_export.families.own_module.sizes import fresh_states, random_inputs
from txl_export.families.own_module.sources import read_source, whose_code
from txl_export.families.own_module.spec import VALID
from txl_export.proof.bits import named
from txl_export.proof.parity import Parity, failing
from txl_export.proof.verification import verify_model

SEQUENCES = 3
"""Of a file that takes any number of them: so many run beside each other at most."""
TRIED = 3
"""Segments in which values are compared where no name tells what is what."""


def verify_file(
    path: Path,
    module: Any,
    weights: str | Path | None,
    pairs: Mapping[str, str],
    arrays: Arrays,
    segments: int | None,
    heard: Listener,
) -> Parity:
    """Compare an ONNX file with a module over chained segments.

    Args:
        path: of the file. ONNX Runtime runs it in a process of its own, within bounds of time and memory.
        module, weights: as `read_source`.
        pairs: inputs of the file that are states, with the outputs that are their next values, where names do not tell.
        arrays: real inputs by the module's names, and by the file's names what every call of it is given besides.
        segments: of the longest chain, or None.
        heard: hears of progress and warnings.

    Raises:
        CheckError: the file cannot be this module's, or does not run where the module does.
        TxlError: the file cannot be read or run, or the module does not do what its specification says.
    """
    foreign = read_foreign(path)
    if whose := whose_code(module):
        heard.warn(f"{whose} is run on this machine")
    spec, name = read_source(module, weights)
    if absent := [entry.name for entry in spec.states if entry.initial is None]:
        raise UsageError(
            f"{name}: state {absent[0]} is absent before the first step, expected one that is there, because a file "
            "takes it in every step; say what it is given first (initial= of its StateSpec)"
        )
    own = {entry.name for entry in spec.inputs}
    samples, given = ({key: one for key, one in arrays.items() if (key in own) is mine} for mine in (True, False))
    logits = [replace(one, role=None if one.role == "logits" else one.role) for one in spec.output_specs]
    spec = replace(spec, outputs=logits, samples=samples or spec.samples)  # what a file returns is not normalised
    by = partial(way_in, str(path), spec, foreign.inputs, foreign.optional, pairs, given)
    first = by({})
    lengths = () if first.length is None else (first.length,)
    with importable(module):
        plan = make_plan(spec, first.batch or SEQUENCES, lengths, heard)
        heard.stage(f"open {path.name}")
        with wired(foreign) as file:
            wiring = _matched(file, plan, first, by)
            _tell(wiring, plan, heard)
            model = FileModel(plan, file, wiring)
            found = verify_model(lambda: model, ModuleReference(plan), name, spec.samples, segments, heard, odd=False)
    defaults = foreign.model.graph.initializers
    starts = {one: defaults[port].const_value for one, port in wiring.takes.items() if port in defaults}
    found = replace(found, gates=(*found.gates, *_first_states(plan, starts)))
    both = {**wiring.takes, **wiring.returns}
    if not found.passed and (order := [f"{both[name]} for {name}" for name in wiring.unsure if name in both]):
        told = "names do not tell all inputs and outputs of the file, so the nearest were taken by their values"
        heard.warn(f"{told}: {some(order, 9)}; if that is not meant, {ADVICE}")
    return replace(found, advice=_told(found, model.engine.still))


def _matched(file: Wired, plan: Plan, first: Wiring, by: Callable[[Counter[tuple[str, str]]], Wiring]) -> Wiring:
    """The way in which the file's inputs and outputs are the module's: `first`, or where it is unsure, `by` values."""
    spec, batch, length, draws = plan.spec, plan.batch_size, plan.segment_lengths[0], np.random.default_rng(5)
    eager, counts = Eager(spec), torch.full((batch,), length, dtype=torch.int32)
    states, calls, runs = fresh_states(spec, batch), list[tuple[Arrays, Arrays]](), list[tuple[Arrays, Arrays]]()
    for _ in range(TRIED):
        inputs = random_inputs(spec, batch, length, draws, spec.samples)
        with contextlib.suppress(*[TxlError] * len(calls)):  # a state may not be allowed to have any numbers
            outputs, after = eager(inputs, states, counts)
            calls.append((_arrays(inputs | states | {VALID: counts}), named(_arrays(outputs), _arrays(after))))
            states = {name: torch.from_numpy(_drawn(one.numpy(), draws)) for name, one in after.items()}
    way = by(sum((_shown(file, eager, first, given) for given, _ in calls), Counter())) if first.unsure else first
    for given, wanted in calls:
        with contextlib.suppress(*[CheckError] * len(runs)):
            runs.append((wanted, file.run(way, given)))
    return way_out(str(file.path), way, runs)


def _drawn(like: Array, draws: np.random.Generator, whole: int | None = None) -> Array:
    """Numbers that most states may have, no two alike as in a first state; whole ones stay, or are `whole`."""
    if like.dtype.kind == "f":
        return np.asarray(draws.random(like.shape) / 2 + 0.25, like.dtype)
    return like if whole is None else np.full_like(like, whole)


def _shown(file: Wired, eager: Eager, way: Wiring, given: Arrays) -> Counter[tuple[str, str]]:
    """How many results are alike where one thing that each side takes has its own numbers, and its rivals the same."""
    kinds = {name: (given[name].dtype.kind, given[name].shape) for name in way.unsure if name != VALID}
    ours, theirs = dict[str, Array](), dict[str, Array]()
    for name in kinds:
        alone = {other: int(other == name) for other in kinds}
        values = {**given, **{one: _drawn(given[one], np.random.default_rng(at), at) for one, at in alone.items()}}
        tensors = {key: torch.from_numpy(one) for key, one in values.items()}
        with contextlib.suppress(TxlError):  # not every number is allowed, and then nothing is shown
            ours[name] = _prints(named(*map(_arrays, eager(tensors, tensors, tensors[VALID]))))
            theirs[name] = _prints(file.run(way, values))
    shown = Counter[tuple[str, str]]()
    for one, two in product(ours, theirs.keys() & way.takes):
        if kinds[one] == kinds[two]:
            alike = np.isclose(ours[one][:, None], theirs[two], 1e-5, 1e-9, equal_nan=True)
            shown[one, way.takes[two]] = int(alike.any(0).sum() + alike.any(1).sum())
    return shown


def _prints(arrays: Arrays) -> Array:
    """One number of each array, by which it is told from others. Nothing in it cancels out, so rounding stays small."""
    with np.errstate(all="ignore"):
        return np.array([np.sum(np.abs(one) * np.random.default_rng(1).random(one.shape)) for one in arrays.values()])


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}


def _tell(wiring: Wiring, plan: Plan, heard: Listener) -> None:
    """Say what the states were taken for, and what the file lacks."""
    for name in [one.name for one in plan.spec.states]:
        port, after = wiring.takes.get(name, ""), wiring.returns.get(f"state {name}", "")
        if port and after and not (kinship(name, port) and kinship(name, after)):
            heard.warn(f"state {name} is taken for the file's {port} and {after}")
        for verb in ["takes"] * (not port) + ["returns"] * (not after):
            heard.warn(f"the file {verb} nothing for state {name}")
    for name in [one.name for one in plan.spec.inputs if one.name not in wiring.takes]:
        heard.warn(f"the file takes nothing for {name}")


def _first_states(plan: Plan, starts: Mapping[str, Any]) -> list[Gate]:
    """The gate on states for which the file has values of its own, which it takes where a call gives none."""
    fresh, limit, worst = _arrays(fresh_states(plan.spec, plan.batch_size)), float32_limit(), 0.0
    for name, tensor in starts.items():
        if name in fresh:
            own = np.broadcast_to(tensor.numpy(), fresh[name].shape)
            worst = max(worst, relative_difference(own, fresh[name]))
    return [Gate("first state of the file max abs (relative)", worst, limit, worst <= limit)] if starts else []


def _told(found: Parity, still: set[str]) -> str:
    """Where the two part first, and what that says. `still` are states that the file never changed."""
    limit = float32_limit()
    for chain in found.chains:
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
        elif chain is not found.chains[0]:
            why = "whole segments of the longest chain agree, so look at resets, at idle sequences and at lengths"
        elif at:
            why = "the first segments agree, so look at what is fed back, at its order, and at what counts steps"
        elif all(key.startswith("state ") for key in names):
            why = "the outputs agree, so look at what is returned as the next state"
        else:
            why = "a single step differs, so look at weights, inputs, arithmetic and modes"
        return f"they part first in segment {at + 1} of {chain.name}, at {some(names, 4)}: {why}"
    missed = [gate.name for gate in failing(found.gates)]
    bits = "a segment that is repeated, or beside others, gives other bits; look for random numbers and mixed rows"
    why = bits if all(name.endswith("(bits)") for name in missed) else "see the table, whose errors are all small"
    return f"{some(missed)} failed: {why}" if missed else ""
