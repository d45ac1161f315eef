"""Checks that a step computes the same every time and keeps only its declared states; refuses other modules.

One experiment runs a chain of eight segments three times: four of usual inputs, one of inputs 10,000 times as large,
one of usual inputs, and two that begin with the initial states again, as after a reset.

    1   the module as it is
    2   the module restored before the first segment, then the same segments
    3   the module restored before every segment, so that only declared states pass from one to the next

If runs 1 and 2 differ, the module draws random numbers, or keeps something outside itself, where nothing is restored.
If runs 1 and 3 differ, it keeps undeclared state. If all three are equal, the module may still keep state that did not
matter in eight segments, e.g. a sample that is held until the next sample is lost. So two more checks follow. No call
may hand torch a tensor that an earlier call left in the module. And a Python number that calls change is set to 0 … 128
and to round numbers, which must not change results. Anything else that calls leave in the module is assumed to be never
read.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from txl_runtime.errors import UsageError, some

from txl_export.families.own_module.attributes import (
    GONE,
    ModuleCopy,
    leaves,
    place_in_python,
    put,
    put_back_at,
    same,
    same_bits,
    value_at,
)
from txl_export.families.own_module.module_call import Eager, Tries, called
from txl_export.families.own_module.own_code import described, in_the_step, is_users
from txl_export.families.own_module.sizes import TORCH, usual_lengths
from txl_export.families.own_module.spec import VALID, Named, StepSpec

_SEGMENTS, _USUAL, _FAR, _RESET = 8, 4, 4, 6
"""Number of segments in a chain, and of usual segments at its beginning; numbers, from 0, of the segment with large
inputs and of the segment that starts from the initial states again."""
_LATER = 16
"""Number of segments after which a state that seemed idle is tried again: compressed rows come after 12 segments."""
_TIMES, _BATCH = 1e4, '"B"'
_NUMBERS = sorted({*range(129), *(10**n + by for n in range(10) for by in (-1, 0)), *(2**n - 1 for n in range(8, 31))})
"""Values that are put in place of a counter, so that `if n % 100 == 0` or `if n > 1000` changes the results."""
_OUTSIDE = "something outside it has changed"
Results = list[dict[str, Tensor]]
"""The tensors of each segment, by names such as "output y" or "state h"."""


class UndeclaredError(UsageError):
    """Calls keep something that no state declares; the message continues with lines of Python to declare it.

    Attributes:
        details: {"declare": lines}: `StateSpec`s to paste, and assignments to write before them.
    """

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.details = {"declare": list(lines)}

    def __str__(self) -> str:
        return "\n    ".join([super().__str__(), *self.details["declare"]])


def run_first_call(spec: StepSpec, batch_size: int, segment_lengths: Sequence[int]) -> None:
    """Let a module change its weights at its first call, if it does so for any input.

    For example, RWKV of transformers divides weights at its first call in evaluation mode and sets a flag. Training
    modes are restored afterwards.

    Args:
        spec: the step.
        batch_size: the batch size B.
        segment_lengths: segment lengths L of the export; the first that the module takes is used.
    """
    modes = {part: part.training for part in spec.module.modules()}
    tries, calls = Tries(Eager(spec), batch_size), list[dict[str, Any]]()
    original = ModuleCopy(spec.module)
    for length in tuple(segment_lengths) or usual_lengths(spec):
        with contextlib.suppress(UsageError):
            arguments, results = (tries.inputs(length), tries.fresh(), tries.valid(length)), Results()
            # the third call starts where the second ended, so that a counter in the module shows
            for inputs in (arguments, (tries.inputs(length), *arguments[1:]), arguments):
                if inputs is not arguments or not calls:
                    original.put_back()
                outputs, after = tries.eager(*inputs)
                results.append(outputs | {f"state {name}": one for name, one in after.items()})
                calls.append(original.changed())
            break
    # compare the first results only: an average may begin at its first sample
    steady = len(calls) == 3 and not _difference(results[:1], results[2:])
    now = calls[-1] if steady else {}
    once = {path for path, value in now.items() if all(same(one.get(path), value) for one in calls)}
    if any(isinstance(original.values.get(path), Tensor) for path in once):
        for path in now.keys() - once:
            put_back_at(spec.module, path, original.values)
    else:
        original.put_back()
    for part, mode in modes.items():
        part.training = mode


def check_step(tries: Tries, length: int, kept: ModuleCopy) -> list[str]:
    """Refuse a module that is no step.

    Args:
        kept: the record of the module, which is restored afterwards.

    Returns:
        Paths of attributes that calls write and no later call was seen to read, e.g. an attention map.

    Raises:
        UsageError: the module returns NaN, writes to its arguments, returns a state's memory as an output, is not
            deterministic, or keeps undeclared state.
    """
    chain, module = _Chain(tries, length, kept), tries.eager.spec.module
    one = chain.begin()
    _check_numbers(tries.eager.spec, one[:_USUAL])
    kept.put_back()
    _check_call(tries, length)
    going_on, anew = list[dict[str, Any]](), list[dict[str, Any]]()
    if what := _difference(one, chain.run(lambda: going_on.append(kept.changed()))):
        with _Draws() as draws:
            chain.run()
        why = f"random numbers are drawn at {draws.place}" if draws.place else _OUTSIDE
        raise UsageError(
            f"two calls of the module with the same inputs and states differ in {what}: {why}; a step computes the "
            "same every time, so leave dropout and noise out of it (training=self.training), and keep no state outside"
        )
    going_on.append(kept.changed())

    def put_back() -> None:
        anew.append(kept.changed())
        kept.put_back()

    differs = _difference(one, chain.run(put_back))
    put_back()
    declared = {entry.attribute for entry in tries.eager.spec.states}
    of_one_call = [(path, value) for call in anew for path, value in call.items()]
    moved = {path for call in (*going_on, *anew) for path in call} - declared
    values = {path: [call[path] for call in (*going_on, *anew) if path in call] for path in moved}
    varying = {path for path, (one_of, *others) in values.items() if not all(same(one_of, other) for other in others)}
    carried = {path for path in varying if not all(any(same(v, w) for _, w in of_one_call) for v in values[path])}
    read = chain.touched(varying) | {path for path in carried if chain.decides(one, path, values[path][-1])}
    if differs:
        read |= {path for path in moved if chain.differs(one, partial(put_back_at, module, path, kept.values))}
    if differs or read:
        paths = sorted(read or moved)
        # of "memory" and "memory.0" keep "memory.0": the attribute was None before
        paths = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
        if not paths:
            raise UsageError(f"{differs} depends on earlier calls, and no attribute of the module changes: {_OUTSIDE}")
        lines = _declarations(chain, one, paths)
        kept.put_back()
        raise UndeclaredError(
            f"a call changes {some(paths)} of the module, which no state declares, and a later call reads it; declare "
            "it as below, or do not keep it",
            lines,
        )
    return sorted(varying)


class _Chain:
    """A chain of segments of one length, and the module that runs it."""

    def __init__(self, tries: Tries, length: int, original: ModuleCopy) -> None:
        self.tries, self.length, self.kept = tries, length, original
        self.segments = [tries.inputs(length) for _ in range(_SEGMENTS)]

    def begin(self) -> Results:
        """Run the chain for the first time; without large inputs if the module refuses them, e.g. as indices."""
        usual = self.segments[_FAR]
        self.segments[_FAR] = {name: one * _TIMES if one.is_floating_point() else one for name, one in usual.items()}
        with contextlib.suppress(UsageError):
            return self.run()
        self.segments[_FAR] = usual
        return self.run()

    def run(
        self,
        between: Callable[[], None] | None = None,
        most: int = _SEGMENTS,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Results:
        """Restore the module and run the chain; `between` runs before each segment, which runs in `around()`."""
        self.kept.put_back()
        results, states = Results(), self.tries.fresh()
        for number, inputs in enumerate(self.segments[:most]):
            states = self.tries.fresh() if number == _RESET else states
            if between is not None:
                between()
            with around():
                outputs, after = self.tries.eager(inputs, states, self.tries.valid(self.length))
            states = dict(after)
            results.append({f"output {name}": one for name, one in outputs.items()})
            results[-1] |= {f"state {name}": one for name, one in after.items()}
        return results

    def differs(self, expected: Results, between: Callable[[], None], most: int = _SEGMENTS) -> bool:
        """Return whether the chain computes something else, or fails, if `between` is called before each segment."""
        try:
            return bool(_difference(expected, self.run(between, most)))
        except (UsageError, LookupError, AttributeError, TypeError):
            return True

    def touched(self, paths: Collection[str]) -> set[str]:
        """Return the paths whose tensors, left by one segment, a later segment passes to any function of torch."""
        attributes, calls = set[str](), count()

        def watching() -> _Touching:
            # nothing is left before the first segment
            now = leaves(self.tries.eager.spec.module) if next(calls) else {}
            return _Touching({path: one for path in paths if isinstance(one := now.get(path), Tensor)}, attributes)

        if paths:
            self.run(around=watching)
        return attributes

    def decides(self, expected: Results, path: str, value: Any) -> bool:
        """Return whether the chain reads a number that calls leave at `path`.

        A float is assumed to be read. A whole number or a flag is read if other values change the first segment.
        """
        module = self.tries.eager.spec.module
        if isinstance(value, Tensor) or value is GONE:
            return False  # `touched` looks at tensors
        if not isinstance(value, (int, np.integer)):
            return True
        others = (False, True) if isinstance(value, bool) else _NUMBERS
        return any(self.differs(expected, partial(put, module, path, type(value)(other)), 1) for other in others)


class _Touching(TorchFunctionMode):
    """Records which tensors are passed to torch's functions, including calls that only ask for a size or property.

    Args:
        watched: tensors by name; a view of a tensor is treated as the tensor.
        paths: the set to which the names of recorded tensors are added.
    """

    def __init__(self, watched: Mapping[str, Tensor], paths: set[str]) -> None:
        super().__init__()
        # hold the tensors, or their freed memory could belong to other tensors
        self._found, self._held = paths, watched
        self._memory = {name: _storage(one) for name, one in watched.items() if one.numel()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and record the tensors that it reads.

        copy_, fill_ and zero_ only write to their first argument, so it is not recorded.
        """
        with torch._C.DisableTorchFunction():
            read = args[1:] if getattr(func, "__name__", "") in ("copy_", "fill_", "zero_") else args
            tensors = [leaf for leaf in tree_leaves((read, kwargs)) if isinstance(leaf, Tensor) and leaf.numel()]
            storages = set(map(_storage, tensors))
            self._found |= {name for name, memory in self._memory.items() if memory in storages}
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage
        return id(tensor)


def _difference(one: Results, other: Results) -> str:
    """Return the first output or state that differs between two runs; "" if all are equal."""
    for ours, theirs in zip(one, other, strict=False):
        for what in ours:
            if what not in theirs or not same_bits(ours[what], theirs[what]):
                return what
    return ""


def _check_numbers(spec: StepSpec, results: Results) -> None:
    """Refuse results with NaN, which cannot be compared with anything."""
    origin = "random inputs" if spec.samples is None else "the inputs that it was given"
    for what, tensor in (pair for call in results for pair in call.items()):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise UsageError(
                f"{what} of the module holds NaN for {origin}, expected numbers; give real ones with samples= or "
                "--inputs, or correct the module"
            )


def _check_call(tries: Tries, length: int) -> None:
    """Refuse a call that writes to its arguments, or whose output shares memory with a state."""
    inputs, states = tries.inputs(length), tries.states(length)
    held = {name: None if one is None else one.clone() for name, one in states.items()}
    step = tries.eager.checked({name: one.clone() for name, one in inputs.items()}, held, tries.valid(length))
    arguments = [entry.name for entry in tries.eager.spec.states if entry.attribute is None]
    pairs = [("input", name, one, inputs[name]) for name, one in step.inputs.items()]
    for kind, name, one, was in [*pairs, *(("state", name, step.states[name], states[name]) for name in arguments)]:
        if one is not None and was is not None and not same_bits(one, was.to(one.dtype)):
            raise UsageError(
                f"{kind} {name} is changed in place by the module; clone it first ({name} = {name}.clone(), in the "
                "module or in step=)" + (" and return the new one" if kind == "state" else "")
            )
    for name, output in step.outputs.items():
        for state, tensor in (*step.states.items(), *step.after.items()):
            if tensor is not None and output.numel() and tensor.numel() and _memory(output) == _memory(tensor):
                raise UsageError(
                    f"output {name} shares its memory with state {state}, so a later step would change it; return "
                    f"{name}.clone()"
                )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for random numbers.

    Attributes:
        place: the line of the user's code that drew the first random numbers; "" if none did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.place and torch.Tag.nondeterministic_seeded in func.tags:
            frames = [frame for frame in in_the_step(traceback.extract_stack()) if is_users(frame.filename)]
            self.place = described(frames[-1]) if frames else str(func)
        return func(*args, **(kwargs or {}))


def _declarations(chain: _Chain, one: Results, paths: Sequence[str]) -> list[str]:
    """Return lines of Python to paste: assignments to write before the StepSpec, and a StateSpec for each path."""
    tries, module, values, seen = chain.tries, chain.tries.eager.spec.module, chain.kept.values, list[dict[str, Any]]()
    for batch, segments in ((tries.batch_size, 1), (tries.batch_size, _SEGMENTS), (tries.batch_size + 1, 1)):
        chain.kept.put_back()
        with contextlib.suppress(UsageError):  # pytorch-tcn streams only one sequence
            Tries(tries.eager, batch).states(chain.length, segments)
        seen.append(chain.kept.changed())
    first, last, wider = seen
    before, states, notes = dict[str, str](), list[str](), dict[str, str]()
    for path in paths:
        name = re.sub(r"^(?=\d)", "state_", re.sub(r"\W+", "_", path))
        place = place_in_python(module, path)
        value, begins, (owner, _, last_name) = last.get(path, values.get(path)), values.get(path), path.rpartition(".")
        new, of_list = path not in values, place.rpartition("[")[0]
        within = [other for other in last if other.rpartition(".")[0] == owner]
        if why := _no_state(module, path):
            notes[place] = f"# {place} {why}"
        elif new and last_name.isdigit() and any(other not in first for other in within):
            notes[of_list] = f"# {of_list} gets longer: keep its rows in one tensor, and declare it with grows="
        elif isinstance(value, Tensor):
            at, grows = _axis(first.get(path), wider.get(path)), _axis(first.get(path), last.get(path))
            if at is None and path not in wider and tries.batch_size in value.shape:
                at = list(value.shape).index(tries.batch_size)
            word = str(value.dtype).removeprefix("torch.")
            of_states, of_torch = ("", "") if word == "float32" else (f', dtype="{word}"', f", dtype=torch.{word}")
            declaration, note = f'StateSpec("{name}", {_tuple(value, at, _BATCH)}{of_states}', ""
            zeros, begin = torch.zeros_like(value), f"torch.zeros({_tuple(value, at, '1')}{of_torch})"
            if grows is not None:
                note = f"  # {value.shape[grows]} are the rows of {_SEGMENTS} segments: say the most"
                declaration, begin = f"{declaration}, grows={grows}", "None"
            elif begins is None and chain.differs(one, partial(put, module, path, zeros), 1):
                declaration, begin = f"{declaration}, initial=None", "None"
            if new and last_name.isdigit():  # e.g. self.memory = None at first, then a list of two tensors
                before[of_list] = f"{of_list} = [None] * {len(within)}"
            elif new:
                before[place] = f"{place} = {begin}"
            states.append(f'{declaration}, attribute="{path}"),{note}')
        elif isinstance(begins, (bool, int, float)):
            kind = {bool: "bool", int: "int32", float: "float32"}[type(begins)]
            states.append(f'StateSpec("{name}", (), dtype="{kind}", attribute="{path}"),')
            before[place] = f"{place} = torch.tensor({begins!r}, dtype=torch.{kind})  # forward sets it to tensors, too"
        else:
            notes[place] = f"# {place} is neither a tensor nor a number: keep in a tensor what a later call reads of it"
    listed = ["states=[  # beside those that are declared", *(f"    {line}" for line in states), "]"] if states else []
    return [*before.values(), *listed, *notes.values()]


def _no_state(module: nn.Module, path: str) -> str:
    """Return the reason why the value at a path, e.g. a parameter, can be no state, and advice; else ""."""
    owner, value = None, None
    with contextlib.suppress(LookupError):
        value, owner = value_at(module, path), value_at(module, path.rpartition(".")[0]) if "." in path else module
    if isinstance(owner, tuple):
        return "is in a tuple, which cannot be set in part: keep it in an attribute, or see step="
    if isinstance(value, nn.Parameter):
        return "is a parameter, and no state is: make it a buffer"
    if isinstance(value, Tensor) and value.dtype not in TORCH.values():
        return f"is {value.dtype}, and a state is {', '.join(TORCH)}: keep it as one of these"
    return ""


def _tuple(tensor: Tensor, at: int | None, batch: str) -> str:
    """Return a tensor's sizes as a Python tuple, with `batch` in place of the size on axis `at`."""
    sizes = [batch if axis == at else str(size) for axis, size in enumerate(tensor.shape)]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def _axis(one: Any, other: Any) -> int | None:
    """Return the first axis along which two tensors have different sizes; None if there is none."""
    sizes = (one.shape, other.shape) if isinstance(one, Tensor) and isinstance(other, Tensor) else ((), ())
    return next((axis for axis, pair in enumerate(zip(*sizes, strict=False)) if pair[0] != pair[1]), None)


def tidied(spec: StepSpec, paths: Sequence[str], values: Mapping[str, Any]) -> StepSpec:
    """Return the same step with some attributes of its module set to `values` before and after each call.

    `values` come from `ModuleCopy.values`. Calls write these attributes and never read them.
    """

    def step(module: Any, inputs: Named, states: Named) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        for path in paths:
            put_back_at(module, path, values)
        data = {name: tensor for name, tensor in inputs.items() if name != VALID}
        try:
            return called(replace(spec, module=module), data, states, inputs.get(VALID))
        finally:
            for path in paths:
                put_back_at(module, path, values)

    return replace(spec, step=step)


def constant_states(tries: Tries, lengths: Sequence[int], segments: int) -> list[str]:
    """Return the declared states that come back unchanged from each of `segments` + 4 segments from the start."""
    constant = [entry.name for entry in tries.eager.spec.states]
    for length in lengths:
        states: Mapping[str, Tensor | None] = tries.fresh()
        for _ in range(segments + _USUAL):
            after = tries.eager(tries.inputs(length), states, tries.valid(length))[1] if constant else {}
            constant = [one for one in constant if states[one] is not None and same(states[one], after[one])]
            states = after
    return constant


def idle_states(tries: Tries, length: int, segments: int) -> list[str]:
    """Return declared states whose value changes no output of four segments, `segments` after the start.

    Rows that have left a first memory are read late, so states that seem idle are tried again after `_LATER` more
    segments.
    """
    idle = _idle_after(tries, length, segments)
    return [name for name in _idle_after(tries, length, segments + _LATER) if name in idle] if idle else []


def _idle_after(tries: Tries, length: int, segments: int) -> list[str]:
    start, fresh = tries.states(length, segments), tries.fresh()
    chain = [tries.inputs(length) for _ in range(_USUAL)]

    def outputs(states: Mapping[str, Tensor | None]) -> Results:
        seen = Results()
        with contextlib.suppress(UsageError):  # the module may not run from changed states
            for inputs in chain:
                results, states = tries.eager(inputs, states, tries.valid(length))
                seen.append(results)
        return [*seen, *({},) * (_USUAL - len(seen))]

    def changes(name: str, held: Tensor) -> bool:
        others = [~held] if held.dtype == torch.bool else [fresh[name], torch.zeros_like(held), held + 1]
        tried = [one for one in others if one is not None and one.shape == held.shape and not same_bits(one, held)]
        return any(_difference(expected, outputs(start | {name: one})) for one in tried)

    expected = outputs(start)
    return [name for name, held in start.items() if held is not None and not changes(name, held)]
