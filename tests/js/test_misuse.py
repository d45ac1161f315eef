"""Arguments and calls of careless callers, in Node: each is understood or refused in one line."""

from __future__ import annotations

import json

import pytest
from frozen import frozen
from scripting import RUNTIME, script

RING = str(frozen("ring"))
OPEN = "const model = await txl.load(given, { ort, threads: 1 });"


def test_an_array_that_does_not_fill_its_shape_is_refused() -> None:
    code = f"""
        {OPEN}
        const arrays = [
            new txl.NdArray("int32", [1, 3], Int32Array.of(1, 2)),
            new txl.NdArray("int32", [1, 2], [1, 2]),
            new txl.NdArray("int32", [1, 2], Float32Array.of(1.5, 2)),
        ];
        tell(await Promise.all(arrays.map((tokens) => fails(() => model.stream(1).run({{ tokens }})))));
    """
    short, plain, floats = script(code, RING)
    assert short == (
        "UsageError: tokens are 2 values of int32 in Int32Array with shape [1, 3], expected as many as the shape has, "
        "of bool, int32, float32 or float16"
    )
    assert plain.startswith("UsageError: tokens hold ")
    assert floats.startswith("UsageError: tokens are 2 values of int32 in Float32Array")


def test_tokens_may_have_any_type_of_whole_numbers() -> None:
    code = f"""
        {OPEN}
        const b = model.batchSize;
        const ids = Array.from({{ length: 4 * b }}, (_, at) => at + 1);
        const shape = [b, 4];
        const tokens = [
            Array.from({{ length: b }}, (_, row) => ids.slice(4 * row, 4 * row + 4)),
            new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), shape),
            new ort.Tensor("int32", Int32Array.from(ids), shape),
            ...[Uint8Array, Int16Array].map((kind) => ({{ data: kind.from(ids), shape }})),
        ];
        const told = [];
        for (const each of tokens) {{
            const stream = model.stream();
            await stream.run({{ tokens: each }});
            told.push([...(await stream.feed(each)).data]);
        }}
        tell(told);
    """
    first, *rest = script(code, RING)
    assert len(rest) == 4
    assert all(found == first for found in rest)


def test_closing_waits_for_the_runs_that_are_under_way() -> None:
    code = """
        const events = [];
        const create = async (...given) => {
            const session = await ort.InferenceSession.create(...given);
            const { inputNames, outputNames } = session;
            const run = async (...feeds) => {
                events.push("run");
                try { return await session.run(...feeds); } finally { events.push("ran"); }
            };
            return { inputNames, outputNames, run, release: async () => void events.push("release") };
        };
        const watched = { env: ort.env, Tensor: ort.Tensor, InferenceSession: { create } };
        const model = await txl.load(given, { ort: watched, threads: 1 });
        const ended = fails(() => model.stream(1).feed([[1, 2]]));
        await model.close();
        tell([events, await ended]);
    """
    events, said = script(code, RING)
    assert events[:3] == ["run", "ran", "release"]
    assert said == "UsageError: the model was closed, expected an open one; load the bundle again"  # by its next run


def test_the_selftest_of_a_closed_model_says_that_it_is_closed() -> None:
    code = f"{OPEN} await model.close(); tell(await fails(() => model.selftest()));"
    assert script(code, RING) == "UsageError: the model was closed, expected an open one; load the bundle again"


@pytest.mark.parametrize("key", ["", "0x1", "1.0", " 1"])
def test_a_bias_is_of_a_token_s_number_in_decimal(key: str) -> None:
    code = f"{OPEN} tell(await fails(() => model.stream(1).generate([1], 3, {{ logitBias: {json.dumps({key: 1})} }})));"
    assert script(code, RING).startswith("UsageError: logitBias is [NaN], expected a list of ids")


def test_two_states_of_one_name_are_refused() -> None:
    code = f"""
        import fs from "node:fs";
        import {{ readManifest }} from {json.dumps((RUNTIME / "src/manifest.js").as_uri())};
        const manifest = JSON.parse(fs.readFileSync(given + "/manifest.json", "utf8"));
        const [state] = manifest.states;
        manifest.states = Array.from({{ length: 6000 }}, (_, at) => ({{ ...state, name: `a.${{at}}` }}));
        manifest.states.push(manifest.states[0]);
        tell(await fails(() => readManifest(new TextEncoder().encode(JSON.stringify(manifest)), "m")));
    """
    assert script(code, RING) == "BundleError: m: two states of rule ring are called a.0; export the model again"


def test_select_before_the_first_token_ends_a_generation() -> None:
    code = f"""
        {OPEN}
        const told = [];
        for (const [b, rows] of [[1, [0, 0]], [2, [0]], [2, [1, 0]]]) {{
            const stream = model.stream(b);
            const drawn = stream.generate(Array(b).fill([1]), 3);
            stream.select(rows);
            told.push(await fails(() => drawn.next()));
        }}
        const stream = model.stream(1);
        const drawn = stream.generate([1], 3);
        stream.reset();
        told.push((await drawn.next()).value.length);
        tell(told);
    """
    refused = "UsageError: the stream was reset, selected or restored while generating; start generate again"
    assert script(code, RING) == [refused, refused, refused, 1]


def test_null_in_the_place_of_an_argument_is_understood_or_refused_in_one_line() -> None:
    code = f"""
        {OPEN}
        const stream = model.stream(1);
        const ids = [[1]];
        const state = stream.take(0);
        const calls = {{
            load: () => txl.load(null),
            "load's options": () => txl.load(given, null),
            "load's files": () => txl.load({{ "manifest.json": null }}, {{ ort }}),
            stream: () => model.stream(null),
            run: () => stream.run(null),
            "run's input": () => stream.run({{ tokens: null }}),
            "run's options": () => stream.run({{ tokens: ids }}, null),
            feed: () => stream.feed(null),
            "feed's options": () => stream.feed(ids, null),
            "feed's lengths": () => stream.feed(ids, {{ lengths: [null] }}),
            score: () => stream.score(null),
            "score's options": () => stream.score(ids, null),
            generate: () => stream.generate(null, 1),
            "generate's count": () => stream.generate([1], null),
            "generate's options": () => stream.generate([1], 1, null),
            temperature: () => stream.generate([1], 1, {{ temperature: null }}),
            forbid: () => stream.generate([1], 1, {{ forbid: null }}),
            bias: () => stream.generate([1], 1, {{ logitBias: {{ 1: null }} }}),
            stops: () => stream.generate([1], 1, {{ stopTexts: [null] }}),
            take: () => stream.take(null),
            put: () => stream.put(0, null),
            "put's row": () => stream.put(null, state),
            select: () => stream.select(null),
            restore: () => stream.restore(null),
            state: () => txl.StreamState.fromBytes(null),
        }};
        const told = {{}};
        for (const [name, call] of Object.entries(calls)) told[name] = String(await fails(async () => call()));
        tell(told);
    """
    told = script(code, RING)
    assert {name: said for name, said in told.items() if not said.startswith("UsageError: ")} == {}
    assert told["run's options"] == (
        "UsageError: the options of run are null, expected an object with some of lengths, commit; leave them out"
    )


def test_null_is_no_text_and_no_list_of_tokens() -> None:
    code = """
        import { Bytes, Words } from RUNTIME;
        const each = [new Bytes(), new Words({ symbols: ["a"] })];
        const told = [];
        for (const one of each) for (const what of ["encode", "decode"]) told.push(await fails(() => one[what](null)));
        tell(told);
    """.replace("RUNTIME", json.dumps((RUNTIME / "src/vocabulary.js").as_uri()))
    assert [said.split(",")[0] for said in script(code)] == [
        "UsageError: the text is null",
        "UsageError: tokens to decode are [NaN]",
    ] * 2
