"""Generation: text in and out, texts that stop it, log-probabilities, and tokens that are fed before they are given."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from txl_runtime import Model, Stream, UsageError, load
from txl_runtime.sessions import Request, Sampling, Sessions, Token

B = 2
PROMPTS = ["de", "f€"]


@pytest.fixture(scope="module")
def model() -> Model:
    return load(frozen("clusters"), backend="cpu", threads=1)


def drawn(stream: Stream, count: int = 12, **options: Any) -> np.ndarray:
    return np.stack(list(stream.generate(PROMPTS, count, **{"seed": 5} | options)))


def bits(stream: Stream) -> list[bytes]:
    return [stream.fill.tobytes(), *(rows.tobytes() for rows in stream.memory().values())]


def ids_of(model: Model, texts: list[str]) -> tuple[np.ndarray, list[int]]:
    ids = [model.vocabulary.encode(text) for text in texts]
    lengths = [len(row) for row in ids]
    return np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in ids]), lengths


@pytest.mark.parametrize("call", ["feed", "score", "step", "generate"])
def test_text_stands_for_the_tokens_that_the_vocabulary_makes_of_it(model, call):
    more = {"max_new_tokens": 4, "seed": 1} if call == "generate" else {}
    by_text, by_ids = model.stream(), model.stream()
    ids, lengths = ids_of(model, PROMPTS)
    found = getattr(by_text, call)(PROMPTS, **more)
    expected = getattr(by_ids, call)(ids, lengths=lengths, **more)
    assert np.array(list(found)).tobytes() == np.array(list(expected)).tobytes()
    assert bits(by_text) == bits(by_ids)


def test_a_text_alone_is_a_stream_of_one(model):
    ids = model.vocabulary.encode("def €")
    assert model.stream(1).feed("def €").tobytes() == model.stream(1).feed(ids[None]).tobytes()
    assert (
        model.stream(1).feed("def €".encode(), last=True).tobytes()
        == model.stream(1).feed([*["def €"]], last=True).tobytes()
    )
    with pytest.raises(UsageError, match=r"tokens are text \('def €'\), expected 2 texts, a list with one for each"):
        model.stream().feed("def €")


@pytest.mark.parametrize("call", ["feed", "step", "score", "generate"])
def test_texts_that_do_not_fit_are_refused_as_texts(model, call):
    more = [4] if call == "generate" else []
    one = r"tokens are text \(\['a', 'b', 'c'\]\), expected 2 texts, a list with one for each sequence$"
    for texts, told in ((["a", "b", "c"], one), (["", ""], "tokens are text without a token, expected at least one")):
        with pytest.raises(UsageError, match=told):
            getattr(model.stream(), call)(texts, *more)
    with pytest.raises(UsageError, match=r"lengths are \[1, 0\].*take them into a stream of their own"):
        model.stream().generate(["a", ""], 4)
    with pytest.raises(UsageError, match=r"lengths are \[2, 3\], expected none beside text"):
        model.stream().feed(PROMPTS, [2, 3])


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_what_was_held_back_can_be_had_when_the_loop_is_left_early(model, count):
    expected = [model.vocabulary.decode(row).decode(errors="replace") for row in drawn(model.stream(), 40)[:count].T]
    generation = model.stream().generate(PROMPTS, 40, seed=5, stop_texts=[long := expected[0][-1:] + "never there"])
    pieces = list(itertools.islice(generation.texts(), count))
    assert ["".join(row) for row in zip(*pieces, generation.finish(), strict=True)] == expected
    if count == 7:
        assert not "".join(row[0] for row in pieces).endswith(long[0]), "the last character may begin a stop text"
    assert list(generation) == []
    assert generation.finish() == ("",) * B


def test_texts_are_what_the_tokens_decode_to(model):
    expected = [model.vocabulary.decode(row).decode(errors="replace") for row in drawn(model.stream(), 40).T]
    pieces = list(model.stream().generate(PROMPTS, 40, seed=5).texts())
    assert len(pieces) == 40
    assert all(len(texts) == B for texts in pieces)
    assert ["".join(row) for row in zip(*pieces, strict=True)] == expected
    assert "\ufffd" in "".join(expected), "some of the bytes are no UTF-8"


def test_tokens_and_texts_of_one_generation_may_be_read_in_turns(model):
    plain = np.stack(list(model.stream(1).generate("ab", 8, seed=2)))
    generation = model.stream(1).generate("ab", 8, seed=2)
    first = next(generation)
    rest = "".join(text for (text,) in generation.texts())
    assert first.tolist() == plain[0].tolist()
    assert rest == model.vocabulary.decode(plain[1:]).decode(errors="replace")


def stopping(model: Model) -> tuple[np.ndarray, list[bytes], int]:
    """Return free draws, each sequence's bytes, and a place of two ASCII letters that are new in the first."""
    free = drawn(model.stream(), 60)
    said = [model.vocabulary.decode(row) for row in free.T]
    ascii_at = [at for at in range(4, 58) if said[0][at] < 128 and said[0][at + 1] < 128]
    where = next(at for at in ascii_at if said[0].find(said[0][at : at + 2]) == at)
    return free, said, where


@pytest.mark.parametrize("feed_last", [False, True])
def test_a_stop_text_ends_its_sequence_and_is_left_out(model, feed_last):
    free, said, where = stopping(model)
    stop = said[0][where : where + 2].decode()
    stream = model.stream()
    generation = stream.generate(PROMPTS, 60, seed=5, stop_texts=[stop, "never there"], feed_last=feed_last)
    pieces = list(generation.texts())
    tokens = drawn(model.stream(), 60, stop_texts=stop)
    for row in range(B):
        at = said[row].find(stop.encode())
        end = len(tokens) if at < 0 else at + 2
        assert tokens[:end, row].tolist() == free[:end, row].tolist()
        assert set(tokens[end - 1 :, row].tolist()) == {int(tokens[end - 1, row])}, "it repeats its last token"
        whole = said[row][: len(tokens)] if at < 0 else said[row][:at]
        assert "".join(text[row] for text in pieces) == whole.decode(errors="replace")
    by_hand, ids = model.stream(), ids_of(model, PROMPTS)
    by_hand.feed(*ids)
    for index, token in enumerate(tokens):
        ends = [
            len(tokens) if said[row].find(stop.encode()) < 0 else said[row].find(stop.encode()) + 2 for row in range(B)
        ]
        by_hand.step(token[:, None], [int(index < end - (not feed_last)) for end in ends])
    assert bits(stream) == bits(by_hand)


def test_the_text_of_a_stop_token_is_left_out(model):
    free = np.concatenate(list(model.stream(1).generate("ab", 30, seed=2)))
    at = next(at for at in range(3, 30) if free[at] not in free[:at])
    texts = model.stream(1).generate("ab", 30, seed=2, stop_tokens=[int(free[at])]).texts()
    assert "".join(text for (text,) in texts) == model.vocabulary.decode(free[:at]).decode(errors="replace")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ring", {}),
        ("clusters", {"temperature": 0}),
        ("ring", {"temperature": 2.5, "top_k": 9}),
        ("clusters", {"top_p": 0.5}),
        ("clusters", {}),
    ],
)
def test_log_probabilities_are_those_of_the_model_whatever_is_done_to_its_distribution(name, options):
    plain = load(frozen(name), backend="cpu", threads=1)
    stream, by_hand, b = plain.stream(), plain.stream(), plain.batch_size
    prompt, lengths = np.arange(12).reshape(3, 4)[:b], [4, 2, 1][:b]
    latest = by_hand.feed(prompt, lengths, last=True)
    generation = stream.generate(prompt, 9, seed=1, lengths=lengths, logprobs=True, **options)
    assert generation.logprobs is None
    for token in generation:
        assert generation.logprobs is not None
        assert generation.logprobs.dtype == np.float32
        assert generation.logprobs.tolist() == latest[np.arange(b), token].tolist()
        latest = by_hand.feed(token[:, None], last=True)


def test_log_probabilities_are_those_that_sessions_tell(model):
    generation = model.stream(1).generate("ab", 6, seed=3, top_k=20, logprobs=True)
    found = [(int(token[0]), float(generation.logprobs[0])) for token in generation]
    with Sessions(model, rows=1) as sessions:
        ids, sampling = model.vocabulary.encode("ab"), Sampling(top_k=20, seed=3)
        ticket = sessions.submit(Request(ids, 6, sampling, top_logprobs=0))
        while sessions.round():
            pass
        told = [(event.id, event.logprob) for event in ticket.events() if isinstance(event, Token)]
    assert found == told


def test_a_sequence_that_has_stopped_has_no_log_probability(model):
    free = drawn(model.stream(), 60)
    stop = int(free[2, 0])
    generation = model.stream().generate(PROMPTS, 8, seed=5, stop_tokens=[stop], logprobs=True)
    logprobs = np.stack([generation.logprobs for _ in generation])
    ends = [int(np.argmax(free[:, row] == stop)) if stop in free[:8, row] else len(logprobs) for row in range(B)]
    assert min(ends) < len(logprobs) - 1
    for row, end in enumerate(ends):
        assert (logprobs[: end + 1, row] < 0).all()
        assert not logprobs[end + 1 :, row].any()


@pytest.mark.parametrize("taken", [1, 3, 12])
@pytest.mark.parametrize("feed_last", [False, True])
def test_memory_holds_the_last_token_where_that_is_asked_for(model, taken, feed_last):
    stream, by_hand = model.stream(), model.stream()
    generation = stream.generate(PROMPTS, 12, seed=5, feed_last=feed_last)
    found = list(itertools.islice(generation, taken))
    by_hand.feed(*ids_of(model, PROMPTS))
    for token in found if feed_last else found[:-1]:
        by_hand.step(token[:, None])
    assert bits(stream) == bits(by_hand)
    assert np.array_equal(found, drawn(model.stream())[:taken])


@pytest.mark.parametrize(("b", "rows"), [(1, [0, 0]), (2, [0]), (2, [1, 0])])
def test_a_prompt_is_not_fed_to_sequences_that_were_selected_meanwhile(model, b, rows):
    stream = model.stream(b)
    generation = stream.generate(PROMPTS[:b], 5)
    stream.select(rows)
    before = bits(stream)
    with pytest.raises(UsageError, match="was reset, selected or restored while generating"):
        next(generation)
    assert bits(stream) == before
    again = model.stream()
    generation = again.generate(PROMPTS, 12, seed=5)
    again.reset()
    assert np.array_equal(np.stack(list(generation)), drawn(model.stream()))


def test_tokens_that_were_fed_are_not_drawn_on_over_replaced_memory(model):
    stream = model.stream()
    generation = stream.generate(PROMPTS, 5, feed_last=True)
    next(generation)
    stream.reset()
    with pytest.raises(UsageError, match="was reset, selected or restored while generating"):
        next(generation)


def test_texts_are_refused_at_once_where_there_is_no_vocabulary():
    generation = load(frozen("zeros"), backend="cpu", threads=1).stream(1).generate([1], 3, seed=1)
    with pytest.raises(
        UsageError, match="the bundle has no vocabulary to read tokens as text, expected one; use token"
    ):
        generation.texts()
    assert len(list(generation)) == 3
