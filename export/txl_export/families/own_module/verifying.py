"""Verifies the bundle of a user's own module, and makes the vectors of its self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray
from txl_report.schema.verification import Gate
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import Bundle
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model
from txl_runtime.selftest import run_selftest

from txl_export.families.own_module.attributes import same_bits
from txl_export.families.own_module.identity import own_tensors, tensors_id
from txl_export.families.own_module.plan import Plan
from txl_export.families.own_module.reference import ModuleReference
from txl_export.families.own_module.sizes import in_bundle
from txl_export.families.own_module.spec import StepSpec
from txl_export.graphs.shared_weights import read_weight_file
from txl_export.proof.parity import Parity
from txl_export.proof.selftest_vectors import selftest_vectors
from txl_export.proof.verification import verify_model

REPLAY_ADVICE = "do not use this bundle here; export it again, or verify it with --module or --adapter"


def verify_step(
    open_model: Callable[[], Model],
    plan: Plan,
    source: str,
    segments: int | None = None,
    listener: Listener | None = None,
    stand_in_for: str | None = None,
) -> Parity:
    """Compare a bundle with the module that it was made from; see `proof.verification.verify_model`."""
    listener, reference = listener or Silent(), ModuleReference(plan)
    if not reference.in_double:
        listener.warn(f"the reference is {reference.described}, so part of what differs may be its own rounding")
    return verify_model(open_model, reference, source, plan.spec.samples, segments, listener, stand_in_for)


def check_same_module(spec: StepSpec, name: str, bundle: Bundle, listener: Listener) -> None:
    """Refuse a module whose tables differ from the bundle's, before anything runs; warn if only the weights differ.

    Raises:
        UsageError: the module has other inputs, outputs or states.
    """
    manifest = bundle.manifest
    for what, entry, expected in _tables(spec, manifest):
        if entry != expected:
            raise UsageError(
                f"{name} is not the module of this bundle: it has the {what} {_listed(entry)}, the bundle has "
                f"{_listed(expected)}; give the module that it was exported from"
            )
    known = manifest.family.get("tensors")
    if known is not None and known != tensors_id(spec):
        first = _first_other(spec, bundle)
        listener.warn("the weights of the module are not those of the bundle" + (f" (first: {first})" if first else ""))


def _first_other(spec: StepSpec, bundle: Bundle) -> str:
    """Return the name of the first tensor that differs from the weight file's; "" if none differs."""
    stored = read_weight_file(bundle.file(bundle.manifest.weights))
    for path, tensor in own_tensors(spec.module).items():
        original = stored.get(path, tensor)
        if original.shape == tensor.shape and not same_bits(original, tensor.detach().to(original.dtype)):
            return path
    return ""


_Table = dict[str, tuple[Any, ...]]


def _tables(spec: StepSpec, manifest: Manifest) -> list[tuple[str, _Table, _Table]]:
    """Return the tables of a specification and of a manifest, in one form to compare: inputs, outputs, states, lengths.

    Outputs whose shapes the specification lacks are compared only by name.
    """
    shaped = {one.name for one in spec.output_specs if one.shape is not None}
    ours: list[_Table] = [
        {one.name: (in_bundle(one.module_dtype), *one.shape, *_beside(one)) for one in spec.inputs},
        {one.name: tuple(one.shape or ()) for one in spec.output_specs},
        {one.name: (in_bundle(one.dtype), *one.axes.sizes(manifest.batch_size, 0)) for one in spec.states},
        {"valid" if spec.lengths else "exact": ()},
    ]
    theirs: list[_Table] = [
        {one.name: (one.dtype, *one.shape, *_beside(one)) for one in manifest.inputs if one.role != "valid"},
        {one.name: tuple(one.shape) if one.name in shaped else () for one in manifest.outputs},
        {one.name: (one.dtype, *one.shape) for one in manifest.states},
        {manifest.lengths: ()},
    ]
    return list(zip(("inputs", "outputs", "states", "lengths"), ours, theirs, strict=True))


def _beside(entry: Any) -> list[str]:
    """Return the notes of an input that a message shows after dtype and shape, e.g. ["tokens=256", "lookahead=2"]."""
    tokens = entry.tokens if hasattr(entry, "tokens") else entry.vocab
    return [f"tokens={tokens}"] * (tokens is not None) + [f"lookahead={entry.lookahead}"] * bool(entry.lookahead)


def _listed(table: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {' × '.join(map(str, facts))}".rstrip() for name, facts in table.items()) or "none"


def replay_vectors(
    open_model: Callable[[], Model], precision: str | None = None, listener: Listener | None = None
) -> Parity:
    """Verify a bundle without its module: replay its stored vectors, and return a gate for each of their limits."""
    listener = listener or Silent()
    listener.stage("replay stored vectors")
    model = open_model()
    result = run_selftest(model, precision)
    gates = tuple(
        Gate(f"stored {name} max abs (relative)", value, result.limits[name], value <= result.limits[name])
        for name, value in result.largest.items()
    )
    source = f"the bundle's own vectors, {result.steps} steps"
    manifest = model.manifest
    return Parity(
        result.backend, manifest.precision, source, (), None, gates, advice=REPLAY_ADVICE, model_id=manifest.model_id
    )


def step_vectors(plan: Plan, manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Return the vectors of the self-test: results of the module in a short chain.

    For example, {"counts": an array [3, 2]} for three steps of two sequences.
    """
    return selftest_vectors(manifest, ModuleReference(plan), plan.spec.samples)
