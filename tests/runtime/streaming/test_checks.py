"""Arguments that fit run as their plain form does; anything else is refused in one line before anything runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from opcodes import bits
from step_models import FEATURES, recurrent
from txl_runtime import BackendError, Model, Stream, StreamState, TxlError, UsageError, load
from txl_runtime.device import choosing
from txl_runtime.device.choosing import DEVICES
from txl_runtime.streaming.checks import FEW, MOST_NAMED
from txl_runtime.streaming.state import RowState

B, L, V = 3, 4, 41
GOOD = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
PATH = frozen("zeros")  # it has no vocabulary


@pytest.fixture(scope="module")
def model() -> Model:
    return load(PATH, "cpu", threads=1, update="rolled")


def refusal(call: Callable[[], object], kind: type[TxlError] = UsageError) -> str:
    """The message of a call that is refused."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert (type(caught.value), caught.value.exit_code) == (kind, 2)
    assert message.isprintable()
    assert ", expected " in message or "but the bundle has no vocabulary" in message
    return message


def unchanged_after_refusal(stream: Stream, call: Callable[[], object]) -> str:
    before = bits(stream)
    message = refusal(call)
    assert bits(stream) == before
    return message


def drawn(stream: Stream, prompt: Any = GOOD, number: Any = 1, **options: Any) -> list[Any]:
    return list(itertools.islice(stream.generate(prompt, number, **{"seed": 1} | options), 2))


# --- what fits: a rule in a sentence for each argument ------------------------------------------------------------


def whole(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= value <= most


def number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


FITS: dict[str, Callable[[Any], bool]] = {
    "max_new_tokens": lambda v: whole(v, 0),
    "temperature": lambda v: number(v) and 0 <= v < math.inf,
    "top_k": lambda v: v is None or whole(v, 1),
    "top_p": lambda v: v is None or (number(v) and 0 < v <= 1),
    "seed": lambda v: v is None or whole(v, 0),
    "stop_tokens": lambda v: isinstance(v, list | set | dict | np.ndarray) and all(whole(one, 0, V - 1) for one in v),
    "forbid": lambda v: FITS["stop_tokens"](v),
    "allow": lambda v: v is None or (FITS["stop_tokens"](v) and len(v) > 0),
    "logit_bias": lambda v: v is None or isinstance(v, dict),
    "adjust": lambda v: v is None,
    "logprobs": lambda v: isinstance(v, int | np.integer | np.bool_),
    "feed_last": lambda v: isinstance(v, int | np.integer | np.bool_),
    "batch_size": lambda v: v is None or whole(v, 1, B),
    "memory_length": lambda v: v is None or whole(v, 0, 6),
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, V + 3),
    st.floats(-0.5, 1.5),
    st.sampled_from(
        [math.nan, math.inf, -math.inf, 2**31, 2**63, 2**70, "5", "luck", b"5", 1j, np.bool_(True), [], {}]
    ),
    st.sampled_from([np.int64(2), np.uint8(3), np.float32(0.5), np.float64(0.9), np.int32(0)]),
    st.lists(st.integers(-1, V + 1), max_size=3),
    st.sets(st.integers(0, V + 1), max_size=2),
    st.sampled_from([["."], [1.5], [None], np.array([1, 2]), np.array([0.5]), object()]),
)


@pytest.mark.parametrize("name", FITS)
@settings(max_examples=40)
@given(value=SCALARS)
@example(value=True)
@example(value=0)
@example(value=1.0)
@example(value=2.0)
@example(value=-0.1)
@example(value=math.nan)
@example(value=math.inf)
@example(value=B + 1)
@example(value=7)
@example(value=[V - 1])
@example(value=[V])
def test_an_option_that_fits_is_taken_and_any_other_is_one_line_that_names_it(model, name, value):
    stream = model.stream()

    def call() -> object:
        if name in ("batch_size", "memory_length"):
            return model.stream(**{name: value})
        return drawn(stream, **{"number": 1, name: value} if name != "max_new_tokens" else {"number": value})

    if FITS[name](value):
        call()
    else:
        assert name in unchanged_after_refusal(stream, call).partition(", expected ")[0]


@st.composite
def tokens(draw: st.DrawFn) -> Any:
    """Mostly whole numbers of B rows, some of them no ids; now and then of another shape or type."""
    kind = draw(st.sampled_from(["i4", "i8", "u8", ">i4", "i1", "u4", "i8", "i4", "f4", "?", "U1", "O"]))
    columns = draw(st.integers(0, 8))
    shape = draw(st.sampled_from([(B, columns)] * 8 + [(B + 1, columns), (B - 1, 2), (B,), (1, B, 2), ()]))
    size = int(np.prod(shape))
    values = draw(st.lists(st.integers(0, V - 1), min_size=size, max_size=size))
    if size and draw(st.booleans()):
        odd = draw(st.sampled_from([V, V + 60, -1, 2**31, 2**32 + 1, 2**63]))
        if np.dtype(kind).kind not in "iu" or np.iinfo(kind).min <= odd <= np.iinfo(kind).max:
            values[draw(st.integers(0, size - 1))] = odd
    return np.array(values, object).reshape(shape).astype(kind)


LENGTHS = st.one_of(
    st.none(),
    st.lists(st.integers(0, 5), min_size=B, max_size=B),
    st.lists(st.integers(-1, 9), min_size=2, max_size=4),
    st.sampled_from([2, [[1], [2], [3]], [1.0, 2.0, 3.0], [True, True, False], "all", [[1], [2, 3], 3]]),
)


def counted(ids: Any, lengths: Any) -> np.ndarray | None:
    """Return the tokens that count, [B, T]; None if something does not fit."""
    if ids.dtype.kind not in "iu" or ids.ndim != 2 or len(ids) != B or not ids.shape[1]:
        return None
    counts = [ids.shape[1]] * B if lengths is None else lengths
    if not isinstance(counts, list) or len(counts) != B or not all(whole(n, 0, ids.shape[1]) for n in counts):
        return None
    counts_here = np.arange(ids.shape[1]) < np.array(counts)[:, None]
    fits = all(0 <= int(token) < V for token in ids[counts_here].tolist())
    return counts_here if fits else None


@pytest.mark.parametrize("call", ["step", "feed", "score", "generate"])
@settings(max_examples=100)
@given(ids=tokens(), lengths=LENGTHS)
@example(ids=np.array([[1], [2], [V]]), lengths=None)
@example(ids=np.full((B, FEW), V), lengths=None)
@example(ids=np.full((B, FEW), -1), lengths=[0, FEW, 0])
def test_tokens_that_fit_give_what_their_plain_form_gives_and_others_are_one_line(model, call, ids, lengths):
    stream, other = model.stream(), model.stream()
    counts = counted(ids, lengths)
    fits = counts is not None and (call != "step" or ids.shape[1] <= L)
    fits = fits and (call != "generate" or counts.any(axis=1).all())

    def run(on: Stream, ids: Any, lengths: Any) -> Any:
        return drawn(on, ids, lengths=lengths) if call == "generate" else getattr(on, call)(ids, lengths)

    if not fits:
        unchanged_after_refusal(stream, lambda: run(stream, ids, lengths))
        return
    plain = np.where(counts, ids, 0).astype(np.int32)
    found, expected = run(stream, ids, lengths), run(other, plain, lengths and np.array(lengths, np.int32))
    assert np.array(found).tobytes() == np.array(expected).tobytes()
    assert bits(stream) == bits(other)


@pytest.mark.parametrize("call", ["reset", "select"])
@settings(max_examples=50)
@given(
    rows=st.one_of(
        st.lists(st.integers(-1, B), max_size=4),
        st.lists(st.booleans(), min_size=1, max_size=4),
        st.sampled_from([[0.0, 1.0], "all", [[0, 1]], [[0], [1, 2]], 1, B, np.zeros(B, bool), np.array([2, 0])]),
    )
)
def test_rows_that_fit_are_those_named_and_others_are_one_line(model, call, rows):
    stream, other = model.stream(), model.stream()
    for each in (stream, other):
        each.feed(GOOD)
    try:
        found = np.asarray(rows)
        named = np.flatnonzero(found) if found.dtype == bool and found.shape == (B,) else np.atleast_1d(found)
        fits = named.ndim == 1 and (not named.size or (named.dtype.kind == "i" and ((named >= 0) & (named < B)).all()))
    except ValueError:
        fits = False
    fits = fits and (call == "reset" or 1 <= len(named) <= B)
    if not fits:
        assert "rows " in unchanged_after_refusal(stream, lambda: getattr(stream, call)(rows))
        return
    getattr(stream, call)(rows)
    getattr(other, call)(named.astype(int).tolist())
    assert bits(stream) == bits(other)


# --- messages -----------------------------------------------------------------------------------------------------


def put(row: int, column: int, token: int) -> np.ndarray:
    ids = GOOD.copy()
    ids[row, column] = token
    return ids


MESSAGES: list[tuple[Callable[[Stream], object], str]] = [
    (lambda s: s.feed(put(1, 2, -1)), "tokens hold id -1 at [1, 2], expected 0 … 40; check the vocabulary"),
    (lambda s: s.score(put(0, 2, V)), "tokens hold id 41 at [0, 2]"),
    (lambda s: s.step(put(2, 1, 2**32 + 1)), f"tokens hold id {2**32 + 1} at [2, 1]"),
    (lambda s: s.feed(GOOD.astype(np.uint64) + np.uint64(2**63)), "tokens hold id 9223372036854775809 at [0, 0]"),
    (lambda s: s.feed([[1, 2**70]] * B), "tokens are object, expected whole numbers"),
    (lambda s: s.feed(GOOD * 1.0), "tokens are float64, expected whole numbers; convert them with astype('int32')"),
    (lambda s: s.feed([["a"], ["b"], ["c"]]), "tokens are <U1, expected whole numbers; encode text with model"),
    (lambda s: s.feed([1, 2, 3]), "tokens have shape [3], expected [3, T] with T at least 1; one row per stream"),
    (lambda s: s.feed([[1, 2], [3], [4, 5]]), "tokens have rows of different lengths, expected one rectangular array"),
    (lambda s: s.step(np.zeros((B, L + 1), int)), "tokens have 5 columns, expected at most one segment of 4; use feed"),
    (lambda s: s.generate([1, 2, 3], 5), "prompt tokens have shape [3]"),
    (lambda s: s.generate(GOOD, 5, lengths=[3, 0, 1]), "lengths are [3, 0, 1], expected at least one prompt token"),
    (lambda s: s.feed(GOOD, [1, 4, 2]), "lengths are [1, 4, 2], expected 3 whole numbers of 0 … 3; 0 leaves a stream"),
    (lambda s: s.feed(GOOD, [1.0, 2.0, 3.0]), "lengths are float64, expected whole numbers"),
    (lambda s: s.reset([0, 3]), "rows are [0, 3], expected indices of streams, 0 … 2"),
    (lambda s: s.reset([True, False]), "rows are bool, expected whole numbers"),
    (lambda s: s.reset(np.zeros(MOST_NAMED + 1, int)), "rows have shape [65537], expected at most 65536 indices"),
    (lambda s: s.select([0, 0, 1, 2]), "rows name 4 sequences, expected 1 … 3"),
    (lambda s: drawn(s, number=None), "max_new_tokens is None, expected a whole number of at least 0"),
    (lambda s: drawn(s, temperature=-0.1), "temperature is -0.1, expected a number of at least 0"),
    (lambda s: drawn(s, top_k=0), "top_k is 0, expected a whole number of at least 1, or None"),
    (lambda s: drawn(s, top_p=0), "top_p is 0, expected more than 0 and at most 1, or None"),
    (lambda s: drawn(s, seed=-1), "seed is -1, expected a whole number of at least 0, or None"),
    (lambda s: drawn(s, stop_tokens=[0] * (MOST_NAMED + 1)), "stop_tokens"),
    (lambda s: drawn(s, stop_tokens=itertools.repeat(0)), "stop_tokens"),
    (lambda s: drawn(s, stop_texts=["a", ""]), "stop_texts is ['a', ''], expected a list of texts of at least one"),
    (lambda s: drawn(s, stop_texts=1), "stop_texts is 1"),
    (lambda s: drawn(s, stop_texts="a"), "the bundle has no vocabulary to read tokens as text"),
    (lambda s: drawn(s, logprobs="yes"), "logprobs is 'yes', expected True or False"),
    (lambda s: s.feed("abc"), "tokens are text ('abc'), but the bundle has no vocabulary"),
    (lambda s: s.generate(["abc", "d", ""], 5), "tokens are text (['abc', 'd', '']), but the bundle has no vocabulary"),
]


@pytest.mark.parametrize(("call", "words"), MESSAGES, ids=[words for _, words in MESSAGES])
def test_a_refusal_says_what_was_found_where_and_what_to_do(model, call, words):
    stream = model.stream()
    assert words in unchanged_after_refusal(stream, lambda: call(stream))


# --- whatever it is -----------------------------------------------------------------------------------------------


class Refuses:
    """Whatever it is asked, it fails."""

    def fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no\nwords")

    __getattr__ = __repr__ = __array__ = __len__ = __iter__ = fail


def endless(depth: int = 200) -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found if not depth else [endless(depth - 1)]


HUGE = 10**11
SPECIAL: dict[str, Callable[[], Any]] = {
    "5000 digits": lambda: 10**5000,
    "minus 5000 digits": lambda: -(10**5000),
    "a surrogate": lambda: "\udc80\ud800",
    "a text of control characters": lambda: "tokens\n\x1b[31m",
    "a NUL": lambda: "a\0b",
    "a memoryview": lambda: memoryview(b"ab"),
    "a ragged list": lambda: [[1], [2, 3]],
    "a recursive list": endless,
    "huge numbers": lambda: [[10**400] * 2] * B,
    "a dict of odd names": lambda: {None: [1], 3: 4, "x\n": 5, (1,): 2},
    "a generator": lambda: (one for one in range(3)),
    "endless numbers": lambda: itertools.repeat(1),
    "an object that refuses": Refuses,
    "a path": lambda: Path("nowhere/at all"),
    "32 dimensions": lambda: np.zeros((1,) * 32, np.int32),
    "objects": lambda: np.full((B, 2), None),
    "records": lambda: np.zeros((B, 2), [("a\n", "i4"), ("b", "f4")]),
    "a masked array": lambda: np.ma.masked_array(np.zeros((B, 2), np.int32), mask=True),
    "a huge array": lambda: np.broadcast_to(np.int32(1), (B, HUGE)),
    "a huge batch": lambda: np.broadcast_to(np.int32(1), (HUGE, 2)),
    "more than int32 counts": lambda: np.broadcast_to(np.int32(1), (B, 2**31)),
    "a state of nothing": lambda: StreamState("", np.zeros(0, np.int32), {}),
    "a state of odd things": lambda: StreamState(None, "fill", [], 5, 7),  # type: ignore[arg-type]
    "a sequence of odd things": lambda: RowState("1", None, {1: 2, "a": "b"}),  # type: ignore[arg-type,dict-item]
    "a sequence without tensors": lambda: RowState(0, 0, None),  # type: ignore[arg-type]
}
ANYTHING = st.one_of(
    SCALARS,
    st.sampled_from([*SPECIAL.values()]).map(lambda make: make()),
    st.text(max_size=5),
    nps.arrays(nps.scalar_dtypes(), nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=B + 1)),
    nps.arrays(st.sampled_from([np.float32, np.int64, np.bool_]), st.sampled_from([(B,), (B, 2), (B, 4, FEATURES)])),
)
OBS, STARTS = np.zeros((B, 4, FEATURES), np.float32), np.zeros(B, np.bool_)
CALLS: dict[str, Callable[[Stream, Any], Any]] = {
    "step(tokens)": lambda s, v: s.step(v),
    "step(lengths)": lambda s, v: s.step(GOOD, v),
    "feed(tokens)": lambda s, v: s.feed(v),
    "feed(last)": lambda s, v: s.feed(GOOD, last=v),
    "score(tokens)": lambda s, v: s.score(v),
    "score(lengths)": lambda s, v: s.score(GOOD, v),
    "generate(prompt)": drawn,
    "generate(max_new_tokens)": lambda s, v: drawn(s, GOOD, v),
    **{f"generate({name})": lambda s, v, name=name: drawn(s, **{name: v}) for name in [*FITS][1:6]},
    "run(inputs)": lambda s, v: s.run(v),
    "run(commit)": lambda s, v: s.run({"tokens": GOOD}, commit=v),
    "run(an array)": lambda s, v: s.run({"tokens": v}),
    "feed(an array)": lambda s, v: s.feed({"tokens": v}),
    "take(row)": lambda s, v: s.take(v),
    "put(row)": lambda s, v: s.put(v, s.take(1)),
    "put(state)": lambda s, v: s.put(1, v),
    "reset(rows)": lambda s, v: s.reset(v),
    "select(rows)": lambda s, v: s.select(v),
    "restore(state)": lambda s, v: s.restore(v),
    "of a step: run(obs)": lambda s, v: s.run({"obs": v, "starts": STARTS}),
    "of a step: run(starts)": lambda s, v: s.run({"obs": OBS, "starts": v}),
    "of a step: run(lengths)": lambda s, v: s.run({"obs": OBS, "starts": STARTS}, v),
    "of a step: feed(obs)": lambda s, v: s.feed({"obs": v, "starts": STARTS}),
    "of a step: put(state)": lambda s, v: s.put(1, v),
    "of a step: restore(state)": lambda s, v: s.restore(v),
}


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Model:
    return load(recurrent().write(tmp_path_factory.mktemp("steps") / "r.txl"), "cpu", threads=1)


def taken_or_refused(stream: Stream | None, call: Callable[[], Any]) -> bool:
    """True for a call that was refused: in a line that can be printed, and then nothing has changed."""
    before = None if stream is None else bits(stream)
    try:
        with np.errstate(all="ignore"):
            call()
    except TxlError as error:
        said = str(error)
    else:
        return False
    assert said.isprintable()
    assert 0 < len(said) < 2000
    assert stream is None or bits(stream) == before
    return True


@pytest.mark.parametrize("name", CALLS)
def test_a_stream_takes_or_refuses_whatever_it_is_given(model, step, name):
    stream = (step if name.startswith("of a step") else model).stream()
    start, refused = stream.snapshot(), 0

    @settings(max_examples=25, database=None)
    @given(value=ANYTHING)
    def tried(value: Any) -> None:
        if stream.batch_size != B:
            stream.select([0] * B)
        stream.restore(start)
        nonlocal refused
        refused += taken_or_refused(stream, lambda: CALLS[name](stream, value))

    tried()
    for make in SPECIAL.values():
        tried.hypothesis.inner_test(make())
    assert refused > 20


@pytest.mark.parametrize("name", ["path", "backend", "threads", "verify_files", "update", "lean"])
def test_load_takes_or_refuses_whatever_it_is_given(name):
    given = {"path": PATH, "backend": "cpu", "threads": 1}
    odd = [None, True, -1, 2**70, 0.5, math.nan, "", "x\n", b"x", [], {}, [None], object(), Path("nowhere"), 1j]
    odd += [make() for make in SPECIAL.values()]
    assert sum(taken_or_refused(None, lambda v=v: load(**{**given, name: v})) for v in odd) > 20


def test_states_and_vocabularies_take_or_refuse_whatever_they_are_given(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = load(frozen("ring"), "cpu").vocabulary
    odd = [None, 5, 2**70, 0.5, "a\n", b"\xff", [], [None], [[1], [2, 3]], object()]
    odd += [make() for name, make in SPECIAL.items() if "huge" not in name and "more than" not in name]
    for call in (model.stream, StreamState.load, model.stream().snapshot().save, words.encode, words.decode):
        assert sum(taken_or_refused(None, lambda v=v, call=call: call(v)) for v in odd) > 5, call


FORMS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda a: a.tolist(),
    "the other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "not contiguous": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "Fortran's order": np.asfortranarray,
    "not aligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "a subclass": lambda a: a.view(np.recarray),
    "a memoryview": lambda a: memoryview(np.ascontiguousarray(a)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_numbers_in_another_form_give_the_same_bits(model, form):
    ids, lengths = np.random.default_rng(0).integers(0, V, (B, 9)), np.array([[9, 4, 0]])
    expected = model.stream().feed(ids, lengths[0]).tobytes()
    given, counts = FORMS[form](ids), lengths[0] if form == "a memoryview" else FORMS[form](lengths)[0]
    if isinstance(given, np.ndarray):
        given.flags.writeable = False
    assert model.stream().feed(given, counts).tobytes() == expected
    runs = [model.stream().run({"tokens": each})["logprobs"] for each in (ids[:, :4], FORMS[form](ids[:, :4]))]
    assert runs[0].tobytes() == runs[1].tobytes()


# --- model and backend --------------------------------------------------------------------------------------------


def test_batch_sizes_and_threads_and_backends_out_of_range_are_named(model, monkeypatch):
    monkeypatch.setattr(choosing, "shows_gpu", lambda: False)
    for size in (0, 4, "2", True):
        message = refusal(lambda size=size: model.stream(size))
        assert message.startswith(f"batch_size is {size!r}, expected 1 … 3; export with --batch-size")
    for threads in (0, -2, 1.5, "2", True, 2**31, 2**70):
        message = refusal(lambda threads=threads: load(PATH, threads=threads), BackendError)
        assert message.startswith(f"threads is {threads!r}, expected a whole number of 1 … 1024, or None")
    for backend in ("gpu", "", "CPU"):
        message = refusal(lambda backend=backend: load(PATH, backend=backend), BackendError)
        assert message == f"backend {backend!r} is unknown, expected one of auto, cpu, rtx, tensorrt, cuda, native"
    for backend in DEVICES:
        message = refusal(lambda backend=backend: load(PATH, backend=backend), BackendError)
        assert message.startswith(f"backend {backend} cannot run here: ")
        assert message.endswith("; or use --backend cpu")


def test_auto_is_the_cpu_and_any_number_of_threads_computes_the_same():
    expected = load(PATH, backend="cpu", threads=1).stream().feed(GOOD)
    for options in ({}, {"backend": "auto"}, {"backend": "cpu", "threads": 2}):
        model = load(PATH, **options)
        assert model.backend.name == "cpu"
        np.testing.assert_allclose(model.stream().feed(GOOD), expected, rtol=0, atol=1e-6)
