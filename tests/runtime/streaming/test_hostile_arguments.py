"""Any value in the place of any argument: it is taken, or refused in one line, and what is refused changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opcodes import bits
from step_models import FEATURES, MODELS
from txl_runtime import Model, Stream, StreamState, TxlError, load
from txl_runtime.streaming.state import RowState

B, V = 3, 60
HUGE = 10**11


class _Refuses:
    """Whatever it is asked, it fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}\nhere")

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no\narray")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")


class _BytesPath:
    def __fspath__(self) -> bytes:
        return b"place"


class _Listed(list[Any]):
    pass


def _endless(depth: int = 200) -> list[Any]:
    found: list[Any] = []
    found.append(found)
    for _ in range(depth):
        found = [found]
    return found


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "a negative number": lambda: -1,
    "a number beyond the vocabulary": lambda: V,
    "beyond int32": lambda: 2**31,
    "beyond int64": lambda: 2**63,
    "beyond uint64": lambda: 2**70,
    "400 digits": lambda: 10**400,
    "5000 digits": lambda: 10**5000,
    "minus 5000 digits": lambda: -(10**5000),
    "a fraction": lambda: 0.5,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "minus infinity": lambda: float("-inf"),
    "a complex number": lambda: 1j,
    "a complex NumPy number": lambda: np.complex64(1),
    "a NumPy number": lambda: np.int64(1),
    "a small NumPy number": lambda: np.uint8(1),
    "a NumPy float": lambda: np.float16(0.5),
    "a NumPy bool": lambda: np.bool_(True),
    "a NumPy text": lambda: np.str_("x"),
    "a date": lambda: np.datetime64("2020-01-01"),
    "a text": lambda: "tokens\n\x1b[31m",
    "a surrogate": lambda: "\udc80\ud800",
    "an empty text": lambda: "",
    "a NUL": lambda: "a\0b",
    "bytes": lambda: b"tokens\n",
    "a bytearray": lambda: bytearray(b"ab"),
    "a memoryview": lambda: memoryview(b"ab"),
    "an empty list": list,
    "a list": lambda: [1, 2],
    "a list of texts": lambda: ["a", "b"],
    "a list of None": lambda: [None],
    "a ragged list": lambda: [[1], [2, 3]],
    "a recursive list": _endless,
    "a list of huge numbers": lambda: [[10**400] * 2] * B,
    "a list of lists of one kind": lambda: _Listed([[1, 2]] * B),
    "a set": lambda: {1, 2},
    "a dict": lambda: {1: 2},
    "a dict of names": lambda: {"tokens": None},
    "a dict of odd names": lambda: {None: [1], 3: 4, "x\n": 5, (1,): 2},
    "a generator": lambda: (number for number in range(3)),
    "endless numbers": lambda: itertools.repeat(1),
    "a range": lambda: range(3),
    "an object": object,
    "a class": lambda: int,
    "a function": lambda: len,
    "an object that refuses": _Refuses,
    "Ellipsis": lambda: ...,
    "a path": lambda: Path("nowhere/at all"),
    "a path of bytes": _BytesPath,
    "a folder": lambda: Path(__file__).parent,
    "0 dimensions": lambda: np.array(1),
    "0 dimensions of a float": lambda: np.array(0.5),
    "no rows": lambda: np.zeros((0, 4), np.int32),
    "no columns": lambda: np.zeros((B, 0), np.int32),
    "one dimension": lambda: np.zeros(4, np.int32),
    "three dimensions": lambda: np.zeros((B, 2, 2), np.int32),
    "32 dimensions": lambda: np.zeros((1,) * 32, np.int32),
    "too many rows": lambda: np.zeros((B + 1, 2), np.int32),
    "an array of floats": lambda: np.zeros((B, 2)),
    "an array of NaN": lambda: np.full((B, 2), np.nan),
    "an array of bools": lambda: np.zeros((B, 2), np.bool_),
    "an array of complex numbers": lambda: np.zeros((B, 2), np.complex128),
    "an array of objects": lambda: np.full((B, 2), None),
    "an array of numbers as objects": lambda: np.ones((B, 2), object),
    "an array of texts": lambda: np.full((B, 2), "x"),
    "an array of dates": lambda: np.zeros((B, 2), "M8[s]"),
    "records": lambda: np.zeros((B, 2), [("a\n", "i4"), ("b", "f4")]),
    "a masked array": lambda: np.ma.masked_array(np.zeros((B, 2), np.int32), mask=True),
    "large unsigned numbers": lambda: np.full((B, 2), 2**64 - 1, np.uint64),
    "negative numbers": lambda: np.full((B, 2), -1, np.int8),
    "numbers beyond int32": lambda: np.full((B, 2), 2**32 + 1, np.int64),
    "lengths that are negative": lambda: np.full(B, -1),
    "lengths beyond int32": lambda: np.full(B, 2**33),
    "lengths of NaN": lambda: np.full(B, np.nan),
    "wide floats": lambda: np.zeros((B, 2), np.longdouble),
    "a huge array": lambda: np.broadcast_to(np.int32(1), (B, HUGE)),
    "a huge row": lambda: np.broadcast_to(np.int32(1), (HUGE,)),
    "a huge batch": lambda: np.broadcast_to(np.int32(1), (HUGE, 2)),
    "more than int32 counts": lambda: np.broadcast_to(np.int32(1), (B, 2**31)),
    "a state of nothing": lambda: StreamState("", np.zeros(0, np.int32), {}),
    "a state of odd things": lambda: StreamState(None, "fill", [], 5, 7),  # type: ignore[arg-type]
    "a sequence of odd things": lambda: RowState("1", None, {1: 2, "a": "b"}),  # type: ignore[arg-type,dict-item]
    "a sequence without tensors": lambda: RowState(0, 0, None),  # type: ignore[arg-type]
}


def _can_be_a_name(value: Any) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError):
        return False
    return True


TOKENS, ONE = np.array([[1, 2], [3, 4], [5, 6]]), {"seed": 1, "temperature": 0.7}


def drawn(stream: Stream, prompt: Any = TOKENS, number: Any = 1, **options: Any) -> Any:
    return list(itertools.islice(stream.generate(prompt, number, **{**ONE, **options}), 1))


CALLS: dict[str, Callable[[Stream, Any], Any]] = {
    "step(tokens)": lambda s, v: s.step(v),
    "step(lengths)": lambda s, v: s.step(TOKENS, v),
    "feed(tokens)": lambda s, v: s.feed(v),
    "feed(lengths)": lambda s, v: s.feed(TOKENS, v),
    "feed(last)": lambda s, v: s.feed(TOKENS, last=v),
    "score(tokens)": lambda s, v: s.score(v),
    "score(lengths)": lambda s, v: s.score(TOKENS, v),
    "generate(prompt)": drawn,
    "generate(max_new_tokens)": lambda s, v: drawn(s, TOKENS, v),
    **{
        f"generate({name})": lambda s, v, name=name: drawn(s, **{name: v})
        for name in ("temperature", "top_k", "top_p", "seed", "stop_tokens", "lengths")
    },
    "run(inputs)": lambda s, v: s.run(v),
    "run(lengths)": lambda s, v: s.run({"tokens": TOKENS}, v),
    "run(commit)": lambda s, v: s.run({"tokens": TOKENS}, commit=v),
    "run(an array)": lambda s, v: s.run({"tokens": v}),
    "run(a name)": lambda s, v: s.run({"tokens": TOKENS, v: TOKENS}) if _can_be_a_name(v) else None,
    "feed(an array)": lambda s, v: s.feed({"tokens": v}),
    "take(row)": lambda s, v: s.take(v),
    "put(row)": lambda s, v: s.put(v, s.take(1)),
    "put(state)": lambda s, v: s.put(1, v),
    "reset(rows)": lambda s, v: s.reset(v),
    "select(rows)": lambda s, v: s.select(v),
    "restore(state)": lambda s, v: s.restore(v),
}
STEP_CALLS: dict[str, Callable[[Stream, Any], Any]] = {
    "run(inputs)": lambda s, v: s.run(v),
    "run(obs)": lambda s, v: s.run({"obs": v, "starts": np.zeros(B, np.bool_)}),
    "run(starts)": lambda s, v: s.run({"obs": np.zeros((B, 4, FEATURES), np.float32), "starts": v}),
    "run(lengths)": lambda s, v: s.run({"obs": np.zeros((B, 4, FEATURES)), "starts": np.zeros(B, np.bool_)}, v),
    "feed(obs)": lambda s, v: s.feed({"obs": v, "starts": np.zeros(B, np.bool_)}),
    "put(state)": lambda s, v: s.put(1, v),
    "restore(state)": lambda s, v: s.restore(v),
    "select(rows)": lambda s, v: s.select(v),
    "step(tokens)": lambda s, v: s.step(v),
}


@pytest.fixture(scope="module")
def model(make_bundle) -> Model:
    return load(make_bundle(batch_size=B, config={}), "cpu", threads=1, update="rolled")


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory) -> Model:
    return load(MODELS["recurrent"]().write(tmp_path_factory.mktemp("steps") / "r.txl"), "cpu", threads=1)


def refused(call: Callable[[], Any]) -> bool:
    """Whether a call is refused, as it has to be: in one line that can be printed."""
    try:
        call()
    except TxlError as error:
        said = str(error)
    else:
        return False
    assert said.isprintable()
    assert 0 < len(said) < 2000
    return True


def all_refused(stream: Stream, call: Callable[[Stream, Any], Any], values: Iterator[tuple[str, Any]]) -> int:
    """How many values are refused; then the stream is what it was."""
    start, count = stream.snapshot(), 0
    before = bits(stream)
    for name, make in values:
        with np.errstate(all="ignore"):
            try:
                said = refused(lambda make=make: call(stream, make()))
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        count += said
        if said:
            assert bits(stream) == before, f"{name} was refused and changed the stream"
        if stream.batch_size != B:
            stream.reset()
            stream.select([0] * B)
        stream.restore(start)
    return count


@pytest.mark.parametrize("call", CALLS)
def test_a_stream_takes_or_refuses_whatever_it_is_given(model, call):
    stream = model.stream()
    stream.feed(np.arange(3 * 5).reshape(3, 5))
    assert all_refused(stream, CALLS[call], iter(VALUES.items())) > 20


@pytest.mark.parametrize("call", STEP_CALLS)
def test_a_stream_of_any_step_takes_or_refuses_whatever_it_is_given(recurrent, call):
    stream = recurrent.stream()
    stream.run({"obs": np.ones((B, 4, FEATURES)), "starts": np.zeros(B, np.bool_)})
    assert all_refused(stream, STEP_CALLS[call], iter(VALUES.items())) > 20


@pytest.mark.parametrize("name", ["path", "backend", "threads", "verify_files", "update", "lean"])
def test_load_takes_or_refuses_whatever_it_is_given(model, name):
    given = {"path": model.bundle.path, "backend": "cpu", "threads": 1}
    costly = {"beyond the vocabulary", "a number beyond the vocabulary"} if name == "threads" else set()
    count = 0
    for value, make in VALUES.items():
        if value not in costly:
            try:
                count += refused(lambda make=make: load(**{**given, name: make()}))
            except Exception as error:
                raise AssertionError(f"{value}: {type(error).__name__}: {error}") from error
    assert count > 20


@pytest.mark.slow
def test_models_states_and_vocabularies_take_or_refuse_whatever_they_are_given(
    make_bundle, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = load(make_bundle(config={"vocab_size": 256}, vocabulary=True), "cpu").vocabulary
    assert words is not None
    state = model.stream().snapshot()
    calls: dict[str, Callable[[Any], Any]] = {
        "stream": model.stream,
        "StreamState.load": StreamState.load,
        "save": state.save,
        "encode": words.encode,
        "decode": words.decode,
    }
    for name, call in calls.items():
        count = 0
        for value, make in VALUES.items():
            try:
                count += refused(lambda make=make, call=call: call(make()))
            except Exception as error:
                raise AssertionError(f"{name} {value}: {type(error).__name__}: {error}") from error
        assert count > 20, name


EQUAL: dict[str, Callable[[Any], Any]] = {
    "a list": lambda a: a.tolist(),
    "wide": lambda a: a.astype(np.uint64),
    "narrow": lambda a: a.astype(np.int8),
    "the other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "not contiguous": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "turned around": lambda a: a[:, ::-1].copy()[:, ::-1],
    "Fortran's order": np.asfortranarray,
    "not aligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "a subclass": lambda a: a.view(np.recarray),
    "a memoryview": lambda a: memoryview(np.ascontiguousarray(a)),
}


@pytest.mark.parametrize("form", EQUAL)
def test_the_same_numbers_in_another_form_give_the_same_bits(model, form):
    tokens, lengths = np.random.default_rng(0).integers(0, V, (B, 9)), np.array([9, 4, 0])
    expected = model.stream().feed(tokens, lengths).tobytes()
    given = EQUAL[form](tokens)
    if isinstance(given, np.ndarray):
        given.flags.writeable = False
    assert (
        model.stream().feed(given, EQUAL[form](lengths[None])[0] if form != "a memoryview" else lengths).tobytes()
        == expected
    )
    arrays = [
        model.stream().run({"tokens": t})["logprobs"].tobytes() for t in (tokens[:, :4], EQUAL[form](tokens[:, :4]))
    ]
    assert arrays[0] == arrays[1]
