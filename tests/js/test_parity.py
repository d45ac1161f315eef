"""The runtime in JavaScript beside Python's, in Node: the same tokens, the same states, the same refusals."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import txl_runtime
from frozen import frozen
from scripting import ROOT, script
from txl_runtime import StreamState
from txl_runtime.streaming.generation import Generation

TINY = ROOT / "samples/tiny.txl"
PROMPT = "def main(arguments):\n"
RUN = """
    const model = await txl.load(given.bundle, { ort, threads: 1, update: given.update });
    const stream = model.stream(given.b ?? 1);
    const told = [];
    for (const options of given.options) {
        stream.reset();
        const drawn = stream.generate(given.prompt, given.count, { logprobs: true, ...options });
        const [tokens, logprobs] = [[], []];
        for await (const token of drawn) { tokens.push([...token]); logprobs.push([...drawn.logprobs]); }
        told.push({ tokens, logprobs });
    }
    tell(told);
"""
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 0.8, "seed": 2},
    {"temperature": 0.7, "seed": 1, "topK": 20},
    {"temperature": 1.3, "seed": 9, "topP": 0.8},
]


def python_s(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `generate` by Python's names."""
    return {{"topK": "top_k", "topP": "top_p"}.get(name, name): value for name, value in options.items()}


def listed(drawn: Generation) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probabilities that Python draws."""
    pairs = [(token.tolist(), np.asarray(drawn.logprobs).tolist()) for token in drawn]
    return [token for token, _ in pairs], [logprobs for _, logprobs in pairs]


@pytest.mark.parametrize("update", ["ring", "rolled"])
def test_200_greedy_and_200_drawn_tokens_are_python_s(update: str) -> None:
    given = {"bundle": str(TINY), "update": update, "prompt": PROMPT, "count": 200, "options": DRAWS}
    found = script(RUN, given)
    stream = txl_runtime.load(TINY, "cpu", threads=1, update=update).stream(1)
    for options, ours in zip(DRAWS, found, strict=True):
        stream.reset()
        tokens, logprobs = listed(stream.generate(PROMPT, 200, logprobs=True, **python_s(options)))
        assert ours["tokens"] == tokens, options
        np.testing.assert_allclose(ours["logprobs"], logprobs, rtol=0, atol=1e-5)


def test_sequences_of_a_batch_draw_numbers_of_their_own() -> None:
    options = [{"temperature": 1, "seed": 4, "lengths": [3, 2, 1]}]
    prompt = [[1, 2, 3], [4, 5, 0], [6, 0, 0]]
    given = {"bundle": str(frozen("ring")), "b": 3, "prompt": prompt, "count": 30, "options": options}
    stream = txl_runtime.load(frozen("ring"), "cpu", threads=1).stream(3)
    tokens, _ = listed(stream.generate(np.array(prompt), 30, seed=4, lengths=[3, 2, 1], logprobs=True))
    assert script(RUN, given)[0]["tokens"] == tokens


def test_a_row_is_adjusted_before_the_draw_as_in_python() -> None:
    code = """
        const model = await txl.load(given.bundle, { ort, threads: 1 });
        const told = [];
        for (const make of [
            { adjust: (row, tokens) => { row[tokens.at(-1)] = -Infinity; return row; } },
            { logitBias: { 101: 3, 32: -100 } },
            { allow: given.letters, forbid: [given.letters[0]] },
            { allow: (tokens) => (tokens.length % 2 ? given.letters : [10, 32]) },
        ]) {
            const tokens = [];
            const options = { seed: 5, temperature: 0.9, ...make };
            for await (const [token] of model.stream(1).generate(given.prompt, 60, options)) tokens.push(token);
            told.push(tokens);
        }
        tell(told);
    """
    letters = list(b"abcdefghij")
    model = txl_runtime.load(TINY, "cpu", threads=1)

    def no_repeats(row: Any, tokens: Any) -> Any:
        row[tokens[-1]] = -np.inf
        return row

    ways: list[dict[str, Any]] = [
        {"adjust": no_repeats},
        {"logit_bias": {101: 3.0, 32: -100.0}},
        {"allow": letters, "forbid": letters[:1]},
        {"allow": lambda tokens: letters if len(tokens) % 2 else [10, 32]},
    ]
    expected = [
        [int(token[0]) for token in model.stream(1).generate(PROMPT, 60, seed=5, temperature=0.9, **way)]
        for way in ways
    ]
    assert script(code, {"bundle": str(TINY), "prompt": PROMPT, "letters": letters}) == expected


def test_text_ends_before_a_stop_text_as_in_python() -> None:
    code = """
        const stream = (await txl.load(given.bundle, { ort, threads: 1 })).stream(1);
        const pieces = [];
        const drawn = stream.generate(given.prompt, 120, { temperature: 0, stopTexts: given.stops });
        for await (const [text] of drawn.texts()) pieces.push(text);
        tell({ pieces, fill: [...stream.fill] });
    """
    stream = txl_runtime.load(TINY, "cpu", threads=1).stream(1)
    plain = "".join(text for (text,) in stream.generate(PROMPT, 120, temperature=0).texts())
    stops = [plain[40:44], "never in it"]
    stream.reset()
    pieces = [text for (text,) in stream.generate(PROMPT, 120, temperature=0, stop_texts=stops).texts()]
    found = script(code, {"bundle": str(TINY), "prompt": PROMPT, "stops": stops})
    assert found == {"pieces": pieces, "fill": stream.fill.tolist()}
    assert "".join(pieces) == plain[: plain.index(stops[0])]


@pytest.mark.parametrize("name", ["ring", "half", "zeros", "policy-16", "axes", "stages", "lockstep"])
def test_a_state_goes_from_python_to_javascript_and_back(name: str, tmp_path: Path) -> None:
    """Two segments in Python, two in JavaScript, two in Python, beside six in Python."""
    model = txl_runtime.load(frozen(name), "cpu", threads=1)
    b, length = model.batch_size, model.segment_lengths[0]
    numbers = np.random.default_rng(3)

    def segment() -> dict[str, Any]:
        return {
            entry.name: numbers.integers(0, entry.vocab, entry.sizes(b, length)).astype(np.int32)
            if entry.vocab
            else numbers.standard_normal(entry.sizes(b, length)).astype(np.float32) > 0
            if entry.dtype == "bool"
            else numbers.standard_normal(entry.sizes(b, length)).astype(np.float32).astype(entry.dtype)
            for entry in model.manifest.given
        }

    segments = [segment() for _ in range(6)]
    first, whole = model.stream(b), model.stream(b)
    for each in segments[:2]:
        first.run(each)
    first.snapshot().save(tmp_path / "python.state")
    packed = [
        {name: {"dtype": str(a.dtype), "shape": a.shape, "data": a.ravel().tolist()} for name, a in each.items()}
        for each in segments[2:4]
    ]
    code = """
        import fs from "node:fs";
        const stream = (await txl.load(given.bundle, { ort, threads: 1 })).stream(given.b);
        stream.restore(txl.StreamState.fromBytes(new Uint8Array(fs.readFileSync(given.state))));
        const kinds = { int32: Int32Array, float32: Float32Array, bool: Uint8Array };
        const arrayOf = ({ dtype, shape, data }) => new txl.NdArray(dtype, shape, kinds[dtype].from(data));
        for (const segment of given.segments) {
            const arrays = Object.entries(segment).map(([name, array]) => [name, arrayOf(array)]);
            await stream.run(Object.fromEntries(arrays));
        }
        tell(Buffer.from(stream.snapshot().toBytes()).toString("base64"));
    """
    told = script(
        code, {"bundle": str(frozen(name)), "b": b, "state": str(tmp_path / "python.state"), "segments": packed}
    )
    last = model.stream(b)
    last.restore(StreamState.from_bytes(base64.b64decode(told)))
    for each in segments[4:]:
        last.run(each)
    for each in segments:
        whole.run(each)
    assert last.fill.tolist() == whole.fill.tolist()
    for tensor, array in whole.state().items():
        np.testing.assert_allclose(last.state()[tensor], array, rtol=1e-3 if name == "half" else 1e-5, atol=1e-5)


def test_a_caller_s_arrays_stay_what_they_are_and_what_does_not_count_changes_nothing() -> None:
    code = """
        const model = await txl.load(given.bundle, { ort, threads: 1 });
        const told = [];
        for (const beyond of [7, 9]) {
            const stream = model.stream(2);
            const ids = Int32Array.of(1, 2, 3, beyond, 5, beyond, beyond, beyond);
            const { logprobs } = await stream.run({ tokens: { data: ids, shape: [2, 4] } }, { lengths: [3, 1] });
            const again = await stream.run({ tokens: [[1], [2]] }, { commit: false });
            const after = await stream.run({ tokens: [[1], [2]] });
            const kept = [...ids].filter((id) => id === beyond).length;
            told.push([kept, ...[logprobs, again.logprobs, after.logprobs].map(({ data }) => [...data])]);
        }
        tell(told);
    """
    (kept, first, peek, after), (also, second, *_) = script(code, {"bundle": str(frozen("ring"))})
    assert (kept, also) == (4, 4)
    assert first == second
    assert peek == after
    rows = [first[at : at + 41] for at in range(0, 8 * 41, 41)]
    assert [any(row) for row in rows] == [True, True, True, False, True, False, False, False]


def test_what_is_wrong_is_said_in_one_line() -> None:
    code = """
        const model = await txl.load(given.ring, { ort, threads: 1 });
        const stream = model.stream(1);
        const running = stream.feed([[1, 2]]);
        const told = [
            await fails(() => stream.feed([[1]])),
            (await running, await fails(() => stream.feed([[1.5]]))),
            await fails(() => stream.feed([[1, 2], [3, 4]])),
            await fails(() => stream.feed([[1e6]])),
            await fails(() => stream.generate([[1]], 5, { temprature: 1 })),
            await fails(() => stream.generate([[1]], 5, { temperature: -1 })),
            await fails(() => stream.generate([[1]], 5, { lookup: 4 })),
            await fails(() => stream.run({ token: [[1]] })),
            await fails(() => stream.restore({})),
            await fails(() => model.stream(99)),
            await fails(() => txl.load("/nowhere", { ort })),
            await fails(() => txl.load(given.ring, { ort, update: "replace" })),
            await fails(() => txl.load(given.ring, { ort: {} })),
            await fails(() => txl.load(given.ring)),
        ];
        const drawn = stream.generate([[1]], 5);
        await drawn.next();
        stream.reset();
        told.push(await fails(() => drawn.next()));
        await model.close();
        told.push(await fails(() => stream.feed([[1]])));
        tell(told);
    """
    expected = [
        "UsageError: a call of the stream is still running, expected one at a time; await it, or open a second stream",
        "UsageError: tokens are float64, expected whole numbers; encode text with model.vocabulary.encode",
        "UsageError: tokens have shape [2, 2], expected [1, T] with T at least 1; one row per stream",
        "UsageError: tokens hold id 1000000 at [0, 0], expected 0 … 40; check the vocabulary the ids come from",
        "UsageError: generate has no option 'temprature', expected some of",
        "UsageError: temperature is -1, expected a number of at least 0; 0 is greedy",
        "UsageError: generate has no option 'lookup', expected some of",
        "UsageError: inputs hold 'token', expected tokens int32 [B, L]; take it out",
        "UsageError: the state is {}, expected a StreamState; StreamState.fromBytes reads one",
        "UsageError: batchSize is 99, expected 1 … 3; export with --batch-size for more sequences",
        "BundleError: /nowhere: found nothing, expected a bundle (a folder); make one with `txl-deploy export`",
        "UsageError: update is 'replace', this bundle has programs for ring, rolled; use one",
        "UsageError: ort is {}, expected the module onnxruntime-web or onnxruntime-node",
        "BackendError: onnxruntime-node cannot be imported (",
        "UsageError: the stream was reset, selected or restored while generating; start generate again",
        "UsageError: the model was closed, expected an open one; load the bundle again",
    ]
    found = script(code, {"ring": str(frozen("ring"))})
    assert len(found) == len(expected)
    for said, wanted in zip(found, expected, strict=True):
        assert said is not None, wanted
        assert said.startswith(wanted), said
        assert "\n" not in said
