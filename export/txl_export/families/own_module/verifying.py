"""The proof of an own module's bundle, and the vectors with which it tests itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest

from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.reference import ModuleReference
from txl_export.parity.report import Gate, Parity
from txl_export.parity.steps.vectors import selftest_vectors
from txl_export.parity.steps.verification import verify_model

REPLAY_ADVICE = "do not use this bundle here; export it again, or verify it with --module FILE.py:FUNCTION"


def verify_step(
    open_model: Callable[[], Model],
    plan: Plan,
    source: str,
    segments: int | None = None,
    listener: Listener | None = None,
    stand_in_for: str | None = None,
) -> Parity:
    """Compare a bundle with the module that it was made from: see `parity.steps.verification.verify_model`."""
    heard, reference = listener or Silent(), ModuleReference(plan)
    if not reference.in_double:
        heard.warn(f"the reference is {reference.described}, so part of what differs may be its own rounding")
    told = [entry.name for entry in plan.spec.states if any(f"state {entry.name} " in line for line in plan.warnings)]
    return verify_model(open_model, reference, source, plan.spec.samples, segments, heard, stand_in_for, told)


def replay_vectors(open_model: Callable[[], Model], listener: Listener | None = None) -> Parity:
    """What can be said of a bundle without the module: whether it still computes what its vectors say."""
    heard = listener or Silent()
    heard.stage("replay stored vectors")
    model = open_model()
    result = run_selftest(model)
    gates = tuple(
        Gate(f"stored {name} max abs (relative)", value, result.limits[name], value <= result.limits[name])
        for name, value in result.largest.items()
    )
    source = f"the bundle's own vectors, {result.steps} steps"
    return Parity(result.backend, model.manifest.precision, source, (), None, gates, advice=REPLAY_ADVICE)


def step_vectors(plan: Plan, manifest: Manifest) -> dict[str, NDArray[Any]]:
    """The vectors of the self-test: what the module computes in a short chain."""
    return selftest_vectors(manifest, ModuleReference(plan), plan.spec.samples)
