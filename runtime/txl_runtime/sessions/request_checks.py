"""Checks of requests against the model and the limits, before a request is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.sessions.jobs import Work
from txl_runtime.sessions.requests import Limits, Request, Sampling
from txl_runtime.streaming.adjusting import adjustment
from txl_runtime.streaming.checks import as_array, check_flag, check_tokens, is_whole, shown
from txl_runtime.streaming.inputs import check_cuttable, check_inputs, check_memory_length, require_tokens, strict_cuts
from txl_runtime.streaming.lookup import longest_draft
from txl_runtime.streaming.partial import Parts
from txl_runtime.streaming.sampling import Sampler, check_stop_tokens
from txl_runtime.types import Array, Ids

COUNTS = {"sessions": 1, "waiting": 0, "host_bytes": 0, "input_bytes": 0, "positions": 1}
"""Smallest allowed value of each limit that is a whole number."""
PLAIN = {
    name: getattr(Request(), name)
    for name in ("tokens", "max_new_tokens", "stop_tokens", "until", "top_logprobs", "score")
}
"""Default values of the fields that a request of inputs must leave at their defaults."""


def check_limits(limits: object) -> Limits:
    """Return the limits after checking them.

    Raises:
        UsageError: a limit has a wrong type or is out of range.
    """
    if not isinstance(limits, Limits):
        raise UsageError(f"limits are {shown(limits)}, expected Limits(...)")
    for name, least in COUNTS.items():
        value = getattr(limits, name)
        if not is_whole(value) or value < least:
            raise UsageError(f"limit {name} is {shown(value)}, expected a whole number of at least {least}")
    if not _is_time(limits.idle_seconds):
        raise UsageError(f"limit idle_seconds is {shown(limits.idle_seconds)}, expected a number above 0")
    return limits


def check_row_count(rows: int | None, manifest: Manifest) -> int:
    """Return the number of stream rows that sessions share; the largest possible number if `rows` is None.

    Raises:
        UsageError: the model's sequences influence one another, or it has no stream of `rows` sequences.
    """
    if not manifest.can.run_fewer:
        raise UsageError(
            "this model's sequences influence one another, expected sequences that sessions can share a stream by; "
            "give each session a model of its own"
        )
    most = manifest.batch_size if manifest.can.run_apart else 1
    if rows is None:
        return most
    if not is_whole(rows) or not 1 <= rows <= manifest.batch_size:
        raise UsageError(
            f"rows are {shown(rows)}, expected 1 … {manifest.batch_size}; export with --batch-size for more"
        )
    if rows > most:
        raise UsageError(
            f"rows are {rows}, expected 1, because this model's sequences run in lockstep; its sessions take turns"
        )
    return int(rows)


def check_request(request: object, manifest: Manifest, limits: Limits, parts: Parts) -> Work:
    """Return a checked request; its arrays are copies.

    Args:
        parts: the loop's rules for committing only a part of a segment.

    Raises:
        UsageError: the model does not support the request, or an option has a wrong type or is out of range.
    """
    if not isinstance(request, Request):
        raise UsageError(f"the request is a {type(request).__name__}, expected Request(...)")
    score, last = check_flag(request.score, "score"), check_flag(request.last, "last")
    most, top, seconds = request.max_new_tokens, request.top_logprobs, request.seconds
    if not is_whole(most) or most < 0:
        raise UsageError(f"max_new_tokens is {shown(most)}, expected a whole number of at least 0")
    if top is not None and (not is_whole(top) or top < 0):
        raise UsageError(f"top_logprobs is {shown(top)}, expected None or a whole number of at least 0")
    if seconds is not None and not _is_time(seconds):
        raise UsageError(f"seconds are {shown(seconds)}, expected a number above 0, or None for no limit")
    if request.until is not None and not callable(request.until):
        raise UsageError(f"until is {shown(request.until)}, expected a function of a token, or None")
    seconds = None if seconds is None else float(seconds)
    rows = None if request.memory_length is None else check_memory_length(request.memory_length, manifest)
    if last and request.inputs is None:
        raise UsageError("a request of tokens has last, expected inputs with it; ask with top_logprobs instead")
    if request.inputs is not None:
        return _arrays(request, manifest, limits, seconds, rows)
    ids = _ids(request, manifest, limits)
    if ids.size + most > limits.positions:
        raise UsageError(
            f"the request has {ids.size} tokens and asks for {shown(most)} more, expected at most {limits.positions} "
            "positions; give it in several requests of one session"
        )
    if score:
        require_tokens(manifest, "score")
    check_whole(manifest, ids.size)
    sampler, draft = _sampler(request.sampling, manifest, parts) if most else (None, 0)
    if rows is not None and rows < (manifest.memory_length or 0):
        draft = 0  # a segment's positions would see `rows` memory rows and one another, more than single steps
    return Work(
        tokens=ids,
        arrays=None,
        columns=0,
        last=False,
        max_new_tokens=int(most),
        sampler=sampler,
        draft=draft,
        stops=check_stop_tokens(request.stop_tokens, manifest.vocab_size),
        until=request.until,
        top=None if top is None else min(int(top), manifest.vocab_size),
        score=score,
        seconds=seconds,
        memory_length=rows,
    )


def check_whole(manifest: Manifest, columns: int) -> None:
    """Check that the tokens fill whole segments, if the model's segment lengths are exact.

    Raises:
        UsageError: no segment length fits the tokens that are left over.
    """
    if columns and not manifest.can.run_ragged:
        strict_cuts(columns, np.array([columns], np.int32), manifest)


def _ids(request: Request, manifest: Manifest, limits: Limits) -> Ids:
    """Return a copy of a request's tokens, int32 [T]."""
    require_tokens(manifest, "a request of tokens")
    tokens = [request.tokens] if isinstance(request.tokens, str | bytes) else request.tokens
    # check this first, because NumPy would make an array of texts, each as long as the longest
    if isinstance(tokens, list | tuple):
        if len(tokens) > limits.positions:
            raise UsageError(
                f"the request has {len(tokens)} tokens, expected at most {limits.positions} positions; give it in "
                "several requests of one session"
            )
        odd = next((entry for entry in tokens if isinstance(entry, str | bytes)), None)
        if odd is not None:
            raise UsageError(
                f"tokens hold {shown(odd)}, expected whole numbers; encode text with model.vocabulary.encode"
            )
    array = as_array(tokens, "tokens")
    if array.ndim != 1:
        raise UsageError(f"tokens have shape {list(array.shape)}, expected [T]; a request is of one sequence")
    if not array.size:
        return np.zeros(0, np.int32)
    ids, _ = check_tokens(array[None], 1, manifest.vocab_size, None)
    return np.array(ids[0])


def _sampler(sampling: object, manifest: Manifest, parts: Parts) -> tuple[Sampler, int]:
    """Return a request's sampler, and the maximum number of tokens of its drafts."""
    require_tokens(manifest, "generate")
    if not manifest.can.run_single:
        raise UsageError(
            f"a token is fed alone after it was drawn, but this model takes segments of "
            f"{list(manifest.segment_lengths)} alone; export it with --segment-length 1 as well"
        )
    if not isinstance(sampling, Sampling):
        raise UsageError(f"sampling is {shown(sampling)}, expected Sampling(...)")
    if not is_whole(sampling.sequence) or not 0 <= sampling.sequence < 2**31:
        raise UsageError(f"sampling's sequence is {shown(sampling.sequence)}, expected a whole number of at least 0")
    for name in ("allow", "forbid"):
        if isinstance(value := getattr(sampling, name), Iterator):
            raise UsageError(f"sampling's {name} is {shown(value)}, which is read once, expected a list of ids")
    adjusted = adjustment(manifest.vocab_size, sampling.adjust, sampling.logit_bias, sampling.allow, sampling.forbid)
    number, draft = int(sampling.sequence), longest_draft(sampling.lookup, manifest, parts)
    drawn = sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed
    return Sampler(*drawn, number, adjusted, sampling.datastore), draft


def _arrays(request: Request, manifest: Manifest, limits: Limits, seconds: float | None, rows: int | None) -> Work:
    """Return a checked request of arrays by name."""
    for name in PLAIN:
        value = getattr(request, name)
        if value is PLAIN[name]:
            continue
        changed = as_array(value, name).size > 0 if name in ("tokens", "stop_tokens") else bool(value != PLAIN[name])
        if changed:
            raise UsageError(f"a request of inputs has {name}, expected inputs alone; give tokens in place of inputs")
    inputs, counts, columns = check_inputs(request.inputs, None, manifest, 1)
    if columns > limits.positions:
        raise UsageError(
            f"the inputs have {columns} positions, expected at most {limits.positions}; give them in several requests "
            "of one session"
        )
    if columns not in manifest.segment_lengths:  # the length of a program is one segment, which is not cut
        cuts = strict_cuts(columns, counts, manifest)
        check_cuttable(cuts, manifest, "give each segment in a request of its own")
    arrays: dict[str, Array] = {name: np.array(array) for name, array in inputs.items()}
    return Work(
        tokens=np.zeros(0, np.int32),
        arrays=arrays,
        columns=columns,
        last=request.last,
        max_new_tokens=0,
        sampler=None,
        draft=0,
        stops=frozenset(),
        until=None,
        top=None,
        score=False,
        seconds=seconds,
        memory_length=rows,
    )


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        return number and 0 < float(value) < math.inf  # type: ignore[arg-type]
    except OverflowError:
        return False
