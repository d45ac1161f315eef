"""The verification: a good bundle passes, and every kind of fault fails at the gate that is there for it."""

import gc
import json
import math
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import txl_export
from seeded_bundle_faults import edit_graphs, forget_oldest, replace_output, scale_weight, set_aside
from support import call_main, random_state, save_checkpoint, small_config
from txl_export.families.transformer_xl.building import reference_for
from txl_export.families.transformer_xl.parity.verification import verify_models
from txl_export.proof.bits import Bits
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.distributions import CHUNK, Distributions
from txl_export.proof.gates import OUTPUTS, judge
from txl_export.proof.parity import Parity
from txl_export.proof.verification import openers
from txl_report.schema.verification import Chain, Gate, Text
from txl_runtime import ladder
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import CheckError, UsageError
from txl_runtime.model import Model
from txl_runtime.streaming.stream import Stream
from verified_steps import Heard, failing

# With a window of M = 7 keys and a clamp, so that an error in either can be made.
WINDOWED = {"same_length": True, "clamp_length": 4}
LOGPROBS, MEMORY = "log-probs max abs", "memory max abs (relative)"
KINDS = ("segments of 4", "segments of 1", "mixed partial segments")
OPERATIONS = "all operations, lengths mixed"
CHAINS = [*(f"{kind}, ring" for kind in (*KINDS, OPERATIONS)), *(f"{kind}, rolled" for kind in KINDS)]
BITS = {"commit=False keeps the state (bits)", "repeated call (bits)", "restored snapshot (bits)"}


@pytest.fixture
def bundle(make_bundle: Callable[..., Path]) -> Path:
    return make_bundle(config=WINDOWED, verify=False)


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "copy.txl")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `bundle`, as a file."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model.pt", small_config(**WINDOWED))


def halves(parity: Parity) -> tuple[tuple[ChainErrors, ...], tuple[ChainErrors, ...]]:
    """The chains of the ring, and those of rolled memory, but for the one with all operations."""
    chains = [chain for chain in parity.chains if not chain.chain.name.startswith(OPERATIONS)]
    return tuple(
        tuple(chain for chain in chains if chain.chain.name.endswith(f", {rule}")) for rule in ("ring", "rolled")
    )


def logprobs_of(chain: ChainErrors) -> TensorErrors:
    return chain.outputs["logprobs"]


def memory_of(chain: ChainErrors) -> TensorErrors:
    return chain.states["memory"]


def verdicts(parity: Parity) -> dict[str, str]:
    return {gate.name: gate.verdict for gate in parity.gates}


# ---- a good bundle


def test_a_good_bundle_passes_against_its_checkpoint_and_against_itself(bundle, checkpoint):
    for options, source in (({"checkpoint": checkpoint}, "the checkpoint"), ({}, "the bundle's own weights")):
        heard = Heard()
        parity = txl_export.verify(bundle, listener=heard, **options)
        assert parity.passed
        parity.require()
        assert parity.reference == f"{source}, computed in float64"
        assert parity.precision == "fp32"
        assert verdicts(parity) == {
            LOGPROBS: "passed",
            MEMORY: "passed",
            "drift (late mean abs)": "passed",
            "drift of memory": "passed",
            "shapes differing": "passed",
            "KL mean": "passed",
            "perplexity (relative)": "not judged",
            **dict.fromkeys(BITS, "passed"),
        }
        assert [chain.chain.name for chain in parity.chains] == CHAINS
        stages = {title: total for title, total in heard.stages if title.startswith("verify against PyTorch")}
        assert list(stages) == ["verify against PyTorch, ring memory", "verify against PyTorch, rolled memory"]
        looks = 2  # segments that are only looked into are run twice
        ran = [chain.chain.segments for chain in parity.chains]
        assert list(stages.values()) == [sum(ran[:4]) - looks, sum(ran[4:])]
        assert heard.steps == sum(stages.values())
        not_again = [line for line in heard.warnings if "not repeated" in line]
        assert bool(not_again) == (not options)


def test_every_row_and_every_state_of_memory_is_compared(make_bundle):
    parity = txl_export.verify(make_bundle(memory="hidden", batch_size=3, verify=False))
    assert parity.passed
    longest, single, _, alone, operations = (chain.chain for chain in parity.chains)
    assert longest.positions == 3 * 4 * longest.segments
    assert longest.full_from == math.ceil(7 / 4)
    assert longest.segments - longest.full_from >= 8
    assert (alone.name, alone.streams) == ("one sequence alone", 1)
    assert (operations.name, operations.full_from) == (OPERATIONS, None)
    assert single.segments > 7
    assert all(logprobs_of(chain).largest > 0 for chain in parity.chains)
    assert all(memory_of(chain).largest > 0 for chain in parity.chains)
    assert failing(parity) == set()
    assert {gate.name for gate in parity.gates} >= {*BITS, "idle rows (bits)", "independent sequences (bits)"}


def test_one_way_is_open_at_a_time_and_the_first_alone_runs_the_text(bundle):
    opened: list[weakref.ref[Model]] = []
    scored: list[str] = []

    def noting(opener: Callable[[], Model]) -> Callable[[], Model]:
        def opening() -> Model:
            gc.collect()
            assert not [model for model in opened if model() is not None], "each holds its weights"
            model = opener()
            opened.append(weakref.ref(model))
            score = Stream.score
            streams = model.stream

            def stream(count: int | None = None) -> Stream:
                made = streams(count)
                made.score = lambda tokens: (scored.append(model_update), score(made, tokens))[1]
                return made

            model_update = model.update
            model.stream = stream
            return model

        return opening

    manifest = open_bundle(bundle).manifest
    state = random_state(small_config(**WINDOWED))
    reference = reference_for(manifest.config, manifest.dialect, manifest.memory_length, state)
    ways = [noting(opener) for opener in openers(bundle, manifest)]
    parity = verify_models(manifest, ways, reference, "the test", np.arange(100, dtype=np.int32) % 60)
    assert parity.passed
    assert len(opened) == 2
    assert set(scored) == {"ring"}
    assert parity.text.tokens == 100


def test_two_hundred_chained_segments_stay_close_and_flat(bundle):
    parity = txl_export.verify(bundle, segments=200)
    longest = parity.chains[0]
    found = logprobs_of(longest).tensor
    assert longest.chain.segments == 200
    assert [chain.chain.segments < 40 for chain in halves(parity)[1]] == [True] * 3, "the other way is run in brief"
    assert found.largest <= 1e-5
    assert len(found.mean) == len(found.most) == 200
    early, late = longest.early_and_late(found.mean)
    assert 0 < late <= 1.5 * early + 1e-6
    assert late < 1e-6
    assert parity.passed


@pytest.mark.parametrize("segments", [0, -1, 1_000_001])
def test_a_number_of_segments_that_makes_no_sense_is_refused(bundle, segments):
    with pytest.raises(UsageError, match=f"--segments is {segments}, expected"):
        txl_export.verify(bundle, segments=segments)


# ---- faults in the bundle


@pytest.mark.parametrize("name", ["layers.01.attention.query_key_value.weight", "embedding.tables.0"])
def test_weights_one_percent_off_fail_against_the_checkpoint(copy, checkpoint, name, monkeypatch, capfd):
    scale_weight(copy, name, 1.01)
    parity = txl_export.verify(copy, checkpoint=checkpoint)
    assert LOGPROBS in failing(parity)
    if name == "layers.01.attention.query_key_value.weight":
        assert MEMORY in failing(parity)
        for command in (("verify", copy, "--checkpoint", checkpoint), ("selftest", copy)):
            code, said, _ = call_main(command, monkeypatch, capfd)
            assert (code, "FAILED" in said) == (1, True)


def test_a_folded_table_of_positions_is_proven_even_against_the_bundles_own_weights(copy):
    scale_weight(copy, "layers.00.attention.position.table.00005", 1.01)
    parity = txl_export.verify(copy)
    assert failing(parity) >= {LOGPROBS}
    assert [chain.chain.name for chain in parity.chains if logprobs_of(chain).largest > 1e-4] == CHAINS


def swap_layers(graph: onnx.GraphProto) -> None:
    names = ("new_memory.layers.00.key", "new_memory.layers.01.key")
    aside = [set_aside(graph, name) for name in names]
    for name, other in zip(names, reversed(aside), strict=True):
        graph.node.append(onnx.helper.make_node("Identity", [other], [name]))


def stale_state(graph: onnx.GraphProto) -> None:
    name = "new_memory.layers.01.value"
    set_aside(graph, name)
    graph.node.append(onnx.helper.make_node("Identity", ["memory.layers.01.value"], [name]))


@pytest.mark.parametrize(
    ("fault", "gates"),
    [(swap_layers, {LOGPROBS, MEMORY}), (stale_state, {LOGPROBS, MEMORY}), (forget_oldest, {MEMORY})],
)
@pytest.mark.parametrize(
    ("files", "ill"),
    [
        pytest.param("*.onnx", (0, 1), marks=pytest.mark.slow),
        ("hidden-ring.onnx", (0,)),
        pytest.param("logprobs-*.onnx", (1,), marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_the_memory_alone_is_found(copy, fault, gates, files, ill):
    edit_graphs(copy, "new_memory.layers.01.value", fault, files)
    parity = txl_export.verify(copy)
    assert failing(parity) >= gates
    # A row that is zeroed after a mere look is not the oldest, and the chain with all operations sees that.
    plain = [logprobs_of(chain).largest for half in halves(parity) for chain in half]
    assert (max(plain) > 1e-4) == (LOGPROBS in gates)
    for number, (longest, *_) in enumerate(halves(parity)):
        # The first segment meets no memory, so its log-probabilities are right; only what it leaves behind is not.
        assert logprobs_of(longest).tensor.most[0] <= 1e-5
        assert (memory_of(longest).largest > 1e-4) == (number in ill)
    with pytest.raises(CheckError) as refused:
        parity.require()
    message = str(refused.value)
    assert all(name in message for name in gates)
    assert "limit 0.0001" in message


@pytest.mark.parametrize(
    ("output", "gates"),
    [("logprobs", {LOGPROBS, "KL mean", "perplexity (relative)"}), ("new_memory.layers.01.value", {LOGPROBS, MEMORY})],
)
def test_nan_fails_every_gate_it_touches(copy, output, gates):
    def spoil(graph: onnx.GraphProto) -> None:
        graph.initializer.append(onnx.numpy_helper.from_array(np.full((), np.nan, np.float32), "nan"))
        replace_output(graph, output, "Add", "nan")

    edit_graphs(copy, output, spoil)
    parity = txl_export.verify(copy, tokens=np.arange(200) % 60)
    assert failing(parity) >= gates
    assert (MEMORY in failing(parity)) == (MEMORY in gates)
    for longest, *_ in halves(parity):
        assert logprobs_of(longest).largest == math.inf
        assert (memory_of(longest).largest == math.inf) == (MEMORY in gates)


# ---- faults in what the reference is told


@pytest.mark.parametrize(
    "change",
    [
        {"window": 6},
        {"clamp_length": 3},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ({"window": 8}, {"window": None}, {"clamp_length": 5})
        ),
    ],
    ids=str,
)
def test_a_reference_of_another_dialect_is_not_matched(bundle, change):
    manifest, state = open_bundle(bundle).manifest, random_state(small_config(**WINDOWED))
    dialect = msgspec.structs.replace(manifest.dialect, **change)
    reference = reference_for(manifest.config, dialect, manifest.memory_length, state)
    parity = verify_models(manifest, openers(bundle, manifest), reference, "another dialect")
    assert LOGPROBS in failing(parity)
    for longest, single, _ in halves(parity):
        assert logprobs_of(longest).largest > 1e-4
        # Nothing tells them apart before there are keys that far away.
        assert logprobs_of(single).tensor.most[0] <= 1e-5


# ---- which model it is


def test_another_checkpoint_is_refused_by_both_names(bundle, tmp_path):
    other = small_config(**WINDOWED)
    path = save_checkpoint(tmp_path / "other.pt", other, random_state(other, seed=1))
    with pytest.raises(CheckError) as refused:
        txl_export.verify(bundle, checkpoint=path)
    names = set(re.findall(r"\b[0-9a-f]{12}\b", str(refused.value)))
    assert len(names) == 2
    assert open_bundle(bundle).manifest.model_id[:12] in names
    assert refused.value.exit_code == 1


# ---- text


def test_text_gates_are_judged_with_tokens_alone(bundle, tmp_path):
    ids = np.random.default_rng(0).integers(0, 60, 300)
    np.save(tmp_path / "ids.npy", ids)
    for given in (ids, tmp_path / "ids.npy"):
        parity = txl_export.verify(bundle, tokens=given)
        assert verdicts(parity)["KL mean"] == verdicts(parity)["perplexity (relative)"] == "passed"
        assert parity.text.tokens == 300
        assert parity.text.relative == pytest.approx(0, abs=1e-5)
        assert parity.text.reference_nll == pytest.approx(parity.text.runtime_nll, abs=1e-5)
        assert parity.text.reference_nll > 1
    assert set(parity.summary()) == {gate.name for gate in parity.gates}


def test_text_needs_a_vocabulary_and_is_read_with_it(bundle, make_bundle, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 2)
    with pytest.raises(UsageError, match="no vocabulary"):
        txl_export.verify(bundle, text=text)
    values = small_config(vocab_size=256)
    path = save_checkpoint(tmp_path / "bytes.pt", values, vocabulary={"kind": "bytes"})
    result = txl_export.export(path, tmp_path / "bytes.txl", segment_length=4, text=text)
    assert result.parity.text.tokens == 512
    assert verdicts(result.parity)["KL mean"] == "passed"
    stored = json.loads((result.path / "report.json").read_bytes())
    assert stored == msgspec.json.decode(msgspec.json.encode(result.parity.document()))
    assert (stored["model_id"], stored["spread"]["ran_on"]) == (result.manifest.model_id, "the text")
    assert sum(stored["text"]["errors"]) == 511
    assert sum(stored["spread"]["kl"]) == stored["spread"]["ranks"]["positions"]
    assert sum(stored["spread"]["errors"]["logprobs"]["counts"]) == 256 * stored["spread"]["ranks"]["positions"]
    assert result.manifest.parity == result.parity.summary()


# ---- the numbers themselves


def logprobs(scores: list[list[float]]) -> np.ndarray:
    values = np.array(scores, np.float64)
    return values - np.logaddexp.reduce(values, axis=1, keepdims=True)


def a_chain(**facts: object) -> ChainErrors:
    """A chain of a Transformer-XL in which nothing ran."""
    plain = {"name": "test", "streams": 1, "segments": 0, "positions": 0}
    return ChainErrors(Chain(**plain | facts), {"logprobs": TensorErrors(nats=True)}, {"memory": TensorErrors()})


def compared(expected: np.ndarray, found: np.ndarray) -> ChainErrors:
    result = a_chain()
    Distributions(result, logprobs_of(result), expected.shape[1]).compare(expected, found)
    logprobs_of(result).end_segment()
    return result


def drifting(curve: list[float], **facts: object) -> ChainErrors:
    """A chain whose errors of log-probabilities were these."""
    result = a_chain(segments=len(curve), **facts)
    logprobs_of(result).tensor.mean, result.kl = list(curve), [0.0]
    return result


def judged(manifest: object, precision: str, chains: list[ChainErrors], **options: object) -> dict[str, Gate]:
    given = {"real": False} | options
    return {gate.name: gate for gate in judge(manifest, precision, "cpu", chains, Bits(), **given)}


def test_identical_distributions_do_not_diverge_and_different_ones_do():
    one, other = logprobs([[3, 1, 0], [0, 2, 1]]), logprobs([[0, 3, 1], [0, 2, 1]])
    same = compared(one, one.copy())
    assert logprobs_of(same).largest == 0
    assert np.allclose(same.kl, 0, atol=1e-15)
    assert (same.chain.agreeing, same.chain.decided, len(same.kl)) == (2, 2, 2)
    different = compared(one, other)
    probabilities = np.exp(one[0])
    assert different.kl[0] == pytest.approx(float((probabilities * (one[0] - other[0])).sum()))
    assert different.kl[0] > 1
    assert different.kl[1] == pytest.approx(0, abs=1e-15)
    assert (different.chain.agreeing, different.chain.decided) == (1, 2)
    assert logprobs_of(different).largest == pytest.approx(float(np.abs(one - other).max()))


def test_divergence_is_of_distributions_and_not_of_their_normalisation():
    one = logprobs([[3, 1, 0]])
    shifted = compared(one, one + 0.5)
    assert shifted.kl[0] == pytest.approx(0, abs=1e-12)
    assert logprobs_of(shifted).largest == pytest.approx(0.5)


def test_one_wrong_column_of_a_large_vocabulary_is_found():
    draws = np.random.default_rng(0)
    expected = logprobs(draws.standard_normal((40, 80_200)))
    assert expected.shape[1] * 2 > CHUNK, "more than one piece"
    for row, column in ((0, 0), (17, 40_123), (39, 80_199)):
        found = expected.astype(np.float32)
        found[row, column] += 2e-4
        result = compared(expected, found)
        assert logprobs_of(result).largest == pytest.approx(2e-4, rel=0.01)
        assert int(np.argmax(result.kl)) == row
        assert len(result.kl) == 40


@pytest.mark.slow
def test_one_wrong_column_of_one_segment_fails_the_bundle(make_bundle, monkeypatch):
    path = make_bundle(config={"vocab_size": 20_000}, verify=False)
    manifest = open_bundle(path).manifest
    reference = reference_for(
        manifest.config, manifest.dialect, manifest.memory_length, random_state(small_config(vocab_size=20_000))
    )
    run, calls = Stream.run, []

    def wrong_once(stream: Stream, *given: object, **options: object) -> dict[str, np.ndarray]:
        result = run(stream, *given, **options)
        calls.append(len(calls))
        if len(calls) == 9:
            result["logprobs"][0, -1, 12_345] += 2e-4
        return result

    assert verify_models(manifest, openers(path, manifest), reference, "the test").passed
    monkeypatch.setattr(Stream, "run", wrong_once)
    parity = verify_models(manifest, openers(path, manifest), reference, "the test")
    assert failing(parity) == {LOGPROBS}
    (found,) = [logprobs_of(chain).tensor for chain in parity.chains if logprobs_of(chain).largest > 1e-4]
    assert [number for number, largest in enumerate(found.most) if largest > 1e-4] == [8]


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([3e-6] * 40, "passed"),
        (list(np.linspace(3e-6, 3.5e-6, 40)), "passed"),
        (list(np.linspace(3e-6, 9e-6, 40)), "FAILED"),
        ([3e-6] * 30 + [8e-6] * 10, "FAILED"),
        ([1e-9] * 20 + [9e-7] * 20, "passed"),
        ([9e-6] * 20 + [3e-6] * 20, "passed"),
        ([3e-6] * 40, "not judged"),
    ],
    ids=["flat", "hardly growing", "growing", "late jump", "below what counts", "shrinking", "too few rows"],
)
def test_drift_is_late_error_above_early_error(bundle, curve, verdict):
    before = [5e-5, 4e-5]  # while memory fills
    rows = [4 if verdict == "not judged" else 16] * (len(curve) + 2)
    chain = drifting(before + curve, full_from=2, rows=rows)
    assert judged(open_bundle(bundle).manifest, "fp32", [chain])["drift of logprobs"].verdict == verdict


def test_the_worst_chain_decides_the_drift(bundle):
    chains = [drifting([3e-6] * 20 + [late] * 20, full_from=0, rows=[16] * 40) for late in (3e-6, 9e-6, 3e-6)]
    gate = judged(open_bundle(bundle).manifest, "fp32", chains)["drift of logprobs"]
    assert gate.passed is False
    assert gate.value == pytest.approx(9e-6)


def test_a_low_precision_is_judged_by_distribution_and_best_token(bundle):
    manifest = msgspec.structs.replace(open_bundle(bundle).manifest, precision="fp16")
    chain = a_chain(agreeing=994, decided=1000)
    chain.kl = [5e-5] * 10
    text = Text(tokens=10, reference_nll=1.0, runtime_nll=1.00001, relative=1e-5)
    for given, verdict in ((None, "not judged"), (text, "FAILED")):
        gates = judged(manifest, "fp16", [chain], text=given, real=given is not None)
        assert OUTPUTS not in gates
        assert gates["top-1 differing"].verdict == verdict
        assert gates["top-1 differing"].value == pytest.approx(0.006)


# ---- an export that fails its gates


@pytest.mark.slow
def test_an_export_that_fails_shows_the_table_and_leaves_nothing(checkpoint, tmp_path, monkeypatch, capfd):
    strict = replace(ladder.LADDER["fp32", "cpu"], logprobs=1e-12)
    monkeypatch.setitem(ladder.LADDER, ("fp32", "cpu"), strict)
    out = tmp_path / "model.txl"
    options = ("export", checkpoint, "-o", out, "--segment-length", 1)
    code, shown, said = call_main(options, monkeypatch, capfd)
    (line,) = [line for line in shown.splitlines() if "FAILED" in line]
    assert (code, line.startswith(LOGPROBS)) == (1, True)
    assert f"error: parity failed: {LOGPROBS} is" in said
    assert not list(tmp_path.iterdir())
