"""What callers hand in is refused before anything runs: the kind, the place, and what to do, in one line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from txl_runtime import BackendError, Stream, TxlError, UsageError, load
from txl_runtime.device import choosing
from txl_runtime.device.choosing import DEVICES
from txl_runtime.streaming.checks import MOST_NAMED

B, L, V = 3, 4, 60
GOOD = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])


@pytest.fixture(scope="module")
def path(make_bundle):
    return make_bundle(batch_size=B, config={})


@pytest.fixture(scope="module")
def model(path):
    return load(path, threads=1)


def refusal(kind: type[TxlError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind
    assert caught.value.exit_code == 2
    assert len(message.splitlines()) == 1
    assert ", expected " in message
    return message


def unchanged_after_refusal(stream: Stream, call: Callable[[], object]) -> str:
    """The message of a refused call, which leaves the stream as it was."""
    stream.feed(GOOD)
    before = stream.snapshot()
    message = refusal(UsageError, call)
    after = stream.snapshot()
    assert after.fill.tolist() == before.fill.tolist()
    assert all(after.memory[name].tobytes() == rows.tobytes() for name, rows in before.memory.items())
    return message


# --- tokens and lengths -------------------------------------------------------------------------------------------


def put(row: int, column: int, token: int) -> np.ndarray:
    tokens = GOOD.copy()
    tokens[row, column] = token
    return tokens


BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "negative id": (put(1, 2, -1), "hold id -1 at [1, 2], expected 0 … 59; check the vocabulary"),
    "id of V": (put(0, 0, 60), "hold id 60 at [0, 0], expected 0 … 59; check the vocabulary"),
    "huge id": (put(2, 1, 2**40), f"hold id {2**40} at [2, 1], expected 0 … 59"),
    "id that wraps to 1": (put(2, 1, 2**32 + 1), f"hold id {2**32 + 1} at [2, 1]"),
    "unsigned huge id": (put(2, 1, 1).astype(np.uint64) + np.uint64(2**63), "hold id 9223372036854775809 at [0, 0]"),
    "id beyond any dtype": ([[1, 2**70]] * B, "are object, expected whole numbers"),
    "float": (GOOD.astype(float), "are float64, expected whole numbers; convert them with astype('int32')"),
    "bool": (GOOD > 2, "are bool, expected whole numbers"),
    "text": ([["a"], ["b"], ["c"]], "are <U1, expected whole numbers"),
    "nothing": (None, "are object, expected whole numbers"),
    "a number": (5, "have shape [], expected [3, T]"),
    "flat": ([1, 2, 3], "have shape [3], expected [3, T] with T at least 1; one row per stream"),
    "three axes": (GOOD[None], "have shape [1, 3, 3], expected [3, T]"),
    "fewer rows": (GOOD[:2], "have shape [2, 3], expected [3, T]"),
    "more rows": (np.concatenate([GOOD, GOOD]), "have shape [6, 3], expected [3, T]"),
    "no column": (GOOD[:, :0], "have shape [3, 0], expected [3, T] with T at least 1"),
    "ragged": ([[1, 2], [3], [4, 5]], "have rows of different lengths, expected one rectangular array; pad them"),
}


@pytest.mark.parametrize(("tokens", "words"), BAD_TOKENS.values(), ids=BAD_TOKENS)
@pytest.mark.parametrize("call", ["step", "feed", "score", "generate"])
def test_bad_tokens_are_refused_and_change_nothing(model, call, tokens, words):
    stream = model.stream()
    more = (5,) if call == "generate" else ()
    message = unchanged_after_refusal(stream, lambda: getattr(stream, call)(tokens, *more))
    assert f"{'prompt tokens' if call == 'generate' else 'tokens'} {words}" in message


@pytest.mark.parametrize("token", [-1, 60, 2**40])
@pytest.mark.parametrize("call", ["step", "feed"])
def test_the_same_ids_are_accepted_in_padding(model, call, token):
    tokens, lengths = put(1, 2, token), [3, 2, 3]
    found = getattr(model.stream(), call)(tokens, lengths)
    assert found.tobytes() == getattr(model.stream(), call)(put(1, 2, 0), lengths).tobytes()


def test_the_last_token_of_a_score_is_checked_although_it_is_not_fed(model):
    assert "hold id 60 at [0, 2]" in refusal(UsageError, lambda: model.stream().score(put(0, 2, 60)))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64, ">i4"])
def test_any_whole_numbers_will_do(model, dtype):
    assert model.stream().feed(GOOD.astype(dtype)).tobytes() == model.stream().feed(GOOD).tobytes()


def test_lists_and_strided_arrays_will_do(model):
    wide = np.repeat(GOOD, 2, axis=1)
    for tokens in (GOOD.tolist(), wide[:, ::2], np.asfortranarray(GOOD)):
        assert model.stream().feed(tokens).tobytes() == model.stream().feed(GOOD).tobytes()


def test_an_array_that_numpy_cannot_read_is_refused(model):
    class OfADevice:
        def __array__(self, *_arguments, **_options):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    with pytest.raises(
        UsageError, match=r"tokens cannot be read by NumPy .*cuda:0.*expected an array in the host's memory"
    ):
        model.stream().step(OfADevice())


def test_a_step_is_at_most_one_segment(model):
    stream = model.stream()
    message = unchanged_after_refusal(stream, lambda: stream.step(np.zeros((B, L + 1), int)))
    assert message == "tokens have 5 columns, expected at most one segment of 4; use feed for more"


BAD_LENGTHS: dict[str, tuple[Any, str]] = {
    "negative": ([1, -1, 2], "lengths are [1, -1, 2], expected 3 whole numbers of 0 … 3; 0 leaves a stream idle"),
    "too long": ([1, 4, 2], "lengths are [1, 4, 2], expected 3 whole numbers of 0 … 3"),
    "too few": ([1, 2], "lengths are [1, 2], expected 3"),
    "too many": ([1, 2, 3, 3], "lengths are [1, 2, 3, 3], expected 3"),
    "one number": (2, "lengths are 2, expected 3"),
    "two axes": ([[1], [2], [3]], "lengths are [[1], [2], [3]], expected 3"),
    "fractions": ([1.0, 2.0, 3.0], "lengths are float64, expected whole numbers"),
    "bools": ([True, True, False], "lengths are bool, expected whole numbers"),
    "text": ("all", "lengths are <U3, expected whole numbers"),
    "ragged": ([[1], [2, 3], 3], "lengths have rows of different lengths"),
}


@pytest.mark.parametrize(("lengths", "words"), BAD_LENGTHS.values(), ids=BAD_LENGTHS)
@pytest.mark.parametrize("call", ["step", "feed", "generate"])
def test_bad_lengths_are_refused_and_change_nothing(model, call, lengths, words):
    stream = model.stream()
    more = (5,) if call == "generate" else ()
    assert words in unchanged_after_refusal(stream, lambda: getattr(stream, call)(GOOD, *more, lengths=lengths))


# --- rows ---------------------------------------------------------------------------------------------------------

BAD_ROWS: dict[str, tuple[Any, str]] = {
    "too large": ([0, 3], "rows are [0, 3], expected indices of streams, 0 … 2"),
    "negative": ([-1], "rows are [-1], expected indices of streams, 0 … 2"),
    "fractions": ([0.0, 1.0], "rows are float64, expected whole numbers"),
    "text": ("all", "rows are <U3, expected whole numbers"),
    "short mask": ([True, False], "rows are bool, expected whole numbers"),
    "two axes": ([[0, 1]], "rows are [[0, 1]], expected indices of streams"),
    "ragged": ([[0], [1, 2]], "rows have rows of different lengths"),
}


@pytest.mark.parametrize(("rows", "words"), BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("call", ["reset", "select"])
def test_bad_rows_are_refused_and_change_nothing(model, call, rows, words):
    stream = model.stream()
    assert words in unchanged_after_refusal(stream, lambda: getattr(stream, call)(rows))


@pytest.mark.parametrize(("rows", "count"), [([], 0), ([0, 0, 1, 2], 4), (np.zeros(B, bool), 0)], ids=str)
def test_select_keeps_one_to_all_streams(model, rows, count):
    stream = model.stream()
    message = unchanged_after_refusal(stream, lambda: stream.select(rows))
    assert message.startswith(f"rows name {count} sequences, expected 1 … 3")


# --- generate -----------------------------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no number of tokens": ({"max_new_tokens": None}, "max_new_tokens is None, expected a whole number of at least 0"),
    "negative number of tokens": ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    "a fraction of tokens": ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
    "tokens or not": ({"max_new_tokens": True}, "max_new_tokens is True"),
    "negative temperature": ({"temperature": -0.1}, "temperature is -0.1, expected a number of at least 0"),
    "temperature nan": ({"temperature": float("nan")}, "temperature is nan"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature is inf"),
    "temperature text": ({"temperature": "hot"}, "temperature is 'hot'"),
    "no temperature": ({"temperature": None}, "temperature is None"),
    "top-k zero": ({"top_k": 0}, "top_k is 0, expected a whole number of at least 1, or None"),
    "top-k fraction": ({"top_k": 2.5}, "top_k is 2.5"),
    "top-k text": ({"top_k": "5"}, "top_k is '5'"),
    "top-p zero": ({"top_p": 0}, "top_p is 0, expected more than 0 and at most 1, or None"),
    "top-p too large": ({"top_p": 1.1}, "top_p is 1.1"),
    "top-p nan": ({"top_p": float("nan")}, "top_p is nan"),
    "top-p text": ({"top_p": "0.9"}, "top_p is '0.9'"),
    "negative seed": ({"seed": -1}, "seed is -1, expected a whole number of at least 0, or None"),
    "seed text": ({"seed": "luck"}, "seed is 'luck'"),
    "one stop token": ({"stop_tokens": 5}, "stop_tokens"),
    "stop token text": ({"stop_tokens": ["."]}, "stop_tokens"),
    "stop token fraction": ({"stop_tokens": [1.5]}, "stop_tokens"),
    "stop token out of range": ({"stop_tokens": [60]}, "stop_tokens"),
    "an empty stop text": (
        {"stop_texts": ["a", ""]},
        "stop_texts is ['a', ''], expected a list of texts of at least one",
    ),
    "a stop text that is none": ({"stop_texts": [b"a"]}, "stop_texts is [b'a']"),
    "a number as stop texts": ({"stop_texts": 1}, "stop_texts is 1"),
    "stop texts without a vocabulary": ({"stop_texts": "a"}, "the bundle has no vocabulary to read tokens as text"),
    "log-probabilities or not": ({"logprobs": "yes"}, "logprobs is 'yes', expected True or False"),
    "feeding or not": ({"feed_last": None}, "feed_last is None, expected True or False"),
    "an empty prompt": ({"lengths": [3, 0, 1]}, "lengths are [3, 0, 1], expected at least one prompt token"),
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_generate_options_are_refused_at_once(model, options, words):
    stream = model.stream()
    message = unchanged_after_refusal(stream, lambda: stream.generate(GOOD, **{"max_new_tokens": 5} | options))
    assert words in message


@pytest.mark.parametrize("tokens", ["abc", b"abc", ["abc", "d", ""]], ids=str)
@pytest.mark.parametrize("call", ["step", "feed", "score", "generate"])
def test_text_is_refused_where_there_is_no_vocabulary(model, call, tokens):
    stream, more = model.stream(), (5,) if call == "generate" else ()
    message = unchanged_after_refusal(stream, lambda: getattr(stream, call)(tokens, *more))
    assert message.startswith(f"tokens are text ({tokens!r}), but the bundle has no vocabulary")
    assert message.endswith("give these, or export with --vocabulary FILE")


def test_more_stop_tokens_than_anybody_needs_are_refused(model):
    for many in ([0] * (MOST_NAMED + 1), itertools.repeat(0)):
        with pytest.raises(UsageError, match="stop_tokens"):
            model.stream().generate(GOOD, 5, stop_tokens=many)


def test_a_flat_prompt_is_for_a_single_stream(model):
    stream = model.stream()
    assert "prompt tokens have shape [3]" in unchanged_after_refusal(stream, lambda: stream.generate([1, 2, 3], 5))


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": np.int64(2)},
        {"temperature": np.float32(0.5), "top_k": np.int32(5), "top_p": np.float64(0.9), "seed": np.uint8(3)},
        {"temperature": 1, "top_p": 1},
        {"stop_tokens": np.array([1, 2])},
        {"stop_tokens": {1, 2}},
        {"stop_tokens": []},
    ],
    ids=str,
)
def test_numpys_numbers_are_as_good_as_pythons(model, options):
    assert 1 <= len(list(model.stream().generate(GOOD, **{"max_new_tokens": 2} | options))) <= 2


# --- model and backend --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [0, -1, 4, 2.0, "2", True])
def test_a_batch_size_out_of_range_is_refused(model, batch_size):
    message = refusal(UsageError, lambda: model.stream(batch_size))
    assert message.startswith(f"batch_size is {batch_size!r}, expected 1 … 3; export with --batch-size")


def test_a_stream_takes_any_batch_size_up_to_the_bundles(model):
    assert [model.stream(size).batch_size for size in (None, 1, np.int64(2), 3)] == [3, 1, 2, 3]


@pytest.mark.parametrize("threads", [0, -2, 1.5, "2", True, 2**31, 2**70])
def test_a_bad_number_of_threads_is_refused(path, threads):
    message = refusal(BackendError, lambda: load(path, threads=threads))
    assert message.startswith(f"threads is {threads!r}, expected a whole number of 1 … 1024, or None")


@pytest.mark.parametrize("backend", DEVICES)
def test_a_device_that_is_not_there_is_refused_with_what_to_use_instead(path, backend, monkeypatch):
    monkeypatch.setattr(choosing, "shows_gpu", lambda: False)
    message = refusal(BackendError, lambda: load(path, backend=backend))
    assert message.startswith(f"backend {backend} cannot run here: ")
    assert message.endswith("; or use --backend cpu")


@pytest.mark.parametrize("backend", ["gpu", "", "CPU", "onnxruntime"])
def test_an_unknown_backend_is_refused_with_those_there_are(path, backend):
    message = refusal(BackendError, lambda: load(path, backend=backend))
    assert message == f"backend {backend!r} is unknown, expected one of auto, cpu, rtx, tensorrt, cuda"


def test_auto_is_the_cpu_and_any_number_of_threads_computes_the_same(path):
    expected = load(path, backend="cpu", threads=1).stream().feed(GOOD)
    for options in ({}, {"backend": "auto"}, {"backend": "cpu", "threads": 2}):
        model = load(path, **options)
        assert model.backend.name == "cpu"
        np.testing.assert_allclose(model.stream().feed(GOOD), expected, rtol=0, atol=1e-6)


def test_every_refusal_is_a_txl_error_and_a_wrong_argument_a_value_error():
    assert issubclass(UsageError, TxlError)
    assert issubclass(UsageError, ValueError)
    assert issubclass(BackendError, TxlError)
