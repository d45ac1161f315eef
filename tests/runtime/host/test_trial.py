"""A stranger's bundle: each combination of sizes runs in a bounded process before it runs here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import onnx
import pytest
import step_models
import txl_runtime
from attacked import attacked
from frozen import frozen
from hostile_graphs import HOSTILE, TRIED, hostile, insert, node
from resealing import copied, reseal
from support import until
from txl_runtime import BundleError, Model, UsageError
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.host import trial_child
from txl_runtime.host.backend import HostBackend
from txl_runtime.host.onnxruntime_cpu import OnnxRuntimeCpu
from txl_runtime.host.trial import TrialEngine
from txl_runtime.sandbox import process
from txl_runtime.sandbox.process import Bounds
from txl_runtime.selftest import run_selftest

FORMS = ("ring", "clusters", "growing", "stages", "lockstep", "half", "int8", "policy-16", "lookahead", "axes")


def tried(model: Model) -> TrialEngine:
    assert isinstance(model.backend, HostBackend)
    assert isinstance(model.backend.engine, TrialEngine)
    return model.backend.engine


def segment(model: Model, length: int, sequences: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of one segment, drawn."""
    draws = np.random.default_rng(seed)
    given = {}
    for entry in model.manifest.given:
        sizes = entry.sizes(sequences, length)
        drawn = draws.integers(0, entry.vocab, sizes) if entry.vocab else draws.normal(size=sizes) > 0
        given[entry.name] = drawn.astype(entry.dtype)
    return given


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log-probabilities of tokens [3, 4] or [3, 1], with a state [3, 11]."""
    return step_models.counting().write(tmp_path_factory.mktemp("trials") / "step.txl")


def changed(bundle: Path, place: Path, program: str, *nodes: onnx.NodeProto, **constants: Any) -> Path:
    """A bundle with nodes behind those that a program has."""
    model = onnx.load(bundle / f"{program}.onnx")
    insert(model, *nodes, **constants)
    copied(bundle, place)
    (place / f"{program}.onnx").write_bytes(model.SerializeToString())
    return reseal(place)


@pytest.fixture
def ending(bundle: Path, tmp_path: Path) -> Path:
    """A bundle whose segments of 4 ask for 2^40 bytes, and whose steps do not."""
    nodes = node("ConstantOfShape", "s", "big"), node("ReduceSum", "big", "sum")
    return changed(bundle, tmp_path / "ending.txl", "step-4", *nodes, s=[2**38])


@pytest.mark.parametrize("name", FORMS)
def test_what_is_computed_after_trials_is_the_same_to_the_bit(name):
    plain, model = (txl_runtime.load(frozen(name), "cpu", trial=trial) for trial in (False, True))
    b = model.batch_size
    streams = [each.stream() for each in (plain, model)]
    for seed in range(12):
        given = segment(model, model.segment_lengths[seed % len(model.segment_lengths)], b, seed)
        try:
            expected = streams[0].run(given)
        except UsageError:  # of states that grow, none of these sizes
            continue
        found = streams[1].run(given)
        assert {key: value.tobytes() for key, value in found.items()} == {k: v.tobytes() for k, v in expected.items()}
    assert tried(model).tried
    model.close()


def test_a_self_test_passes_with_trials_and_runs_nothing_untried(monkeypatch):
    model, engine = txl_runtime.load(frozen("clusters"), "cpu", trial=True), OnnxRuntimeCpu
    real, bound = engine.bind, set()

    def bind(self: Any, program: Any, inputs: Any, outputs: Any) -> Any:
        bound.add((program.name, tuple((name, array.shape) for name, array in [*inputs.items(), *outputs.items()])))
        assert bound == set(tried(model).tried), "each is tried first"
        return real(self, program, inputs, outputs)

    monkeypatch.setattr(engine, "bind", bind)
    assert run_selftest(model).passed
    assert {name for name, _ in bound} > {"head", "tail.1", "tail.2"}


def test_sizes_that_are_known_are_not_asked_for_again(bundle, monkeypatch):
    model = txl_runtime.load(bundle, trial=True)
    given = segment(model, 4, 3)
    model.stream().run(given)
    monkeypatch.setattr(tried(model)._process, "ask", None)
    stream = model.stream()
    for _ in range(3):
        stream.run(given)


def test_a_trial_that_ends_is_one_line_and_what_was_tried_goes_on(ending):
    model = txl_runtime.load(ending, trial=True)
    stream = model.stream()
    one = segment(model, 1, 3)
    stream.run(one)
    before = stream.state()
    with pytest.raises(BundleError) as refused:
        stream.run(segment(model, 4, 3))
    said = str(refused.value)
    assert said.startswith(f"{ending}: in a trial, program step-4 ")
    assert said.endswith(
        "give larger bounds: `load(path, trial=Bounds(...))`, or `inspect BUNDLE --check --memory BYTES "
        "--processor-seconds N`"
    )
    assert said.isprintable()
    assert np.array_equal(stream.state()["seen"], before["seen"])
    assert set(tried(model)._engines) == {"step-1.onnx"}, "the graph that was refused is never opened here"
    stream.run(one)


def test_a_process_that_dies_in_a_trial_tries_nothing_more(bundle):
    model = txl_runtime.load(bundle, trial=True)
    stream = model.stream()
    one = segment(model, 1, 3)
    stream.run(one)
    tried(model)._process._process.kill()
    with pytest.raises(
        BundleError,
        match=r"program step-4 with tokens \[3, 4\], valid \[3\], .*: died of SIGKILL, expected programs that run on "
        "zeros; do not use this bundle$",
    ):
        stream.run(segment(model, 4, 3))
    with pytest.raises(
        BundleError, match=r"its trial ended before \(program step-4 .*: died of SIGKILL\), .*; load it again$"
    ):
        stream.run(segment(model, 4, 3))
    stream.run(one)


def test_an_interrupted_trial_is_told_by_the_next_one(bundle, monkeypatch):
    model = txl_runtime.load(bundle, trial=True)
    with monkeypatch.context() as patch:
        patch.setattr(process.child, "read_frame", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.stream().run(segment(model, 4, 3))
    with pytest.raises(BundleError, match=r"its trial ended before \(program step-4 .*: was interrupted\), .*again$"):
        model.stream().run(segment(model, 4, 3))


def test_a_graph_that_the_trial_cannot_open_is_never_opened_here(bundle, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(OnnxRuntimeCpu, "__init__", lambda *_: opened.append(1))
    path = copied(bundle, tmp_path / "a.txl")
    (path / "step-4.onnx").write_bytes(hostile(bundle, "outer products"))
    with pytest.raises(
        BundleError, match=r"a\.txl/step-4\.onnx: .*; expected a graph ONNX Runtime can load$"
    ) as refused:
        txl_runtime.load(reseal(path), trial=True)
    assert str(refused.value).startswith(str(path))
    assert not opened


def test_counts_are_tried_as_they_are_since_a_graph_may_divide_by_them(bundle, tmp_path):
    """A whole number divided by zero ends the process in ONNX Runtime: an honest graph never does that."""
    path = changed(bundle, tmp_path / "a.txl", "step-4", node("Div", "seven valid", "x"), seven=np.int32([7]))
    model = txl_runtime.load(path, trial=True)
    model.stream().run(segment(model, 4, 3))
    assert len(tried(model).tried) == 1


def test_what_a_manifest_declares_is_counted_before_anything_of_its_size_is_made(bundle):
    with pytest.raises(BundleError, match=r"program step-4 declares \d+ bytes of inputs and outputs, expected at most"):
        txl_runtime.load(bundle, trial=Bounds(memory=1000))


def test_another_manifest_than_the_trial_read_is_refused(bundle, monkeypatch):
    monkeypatch.setattr("txl_runtime.host.trial_child.digest", lambda manifest: "another")
    with pytest.raises(BundleError, match=r"was replaced since its trial began, .*; load it again$"):
        txl_runtime.load(bundle, trial=True)


def test_a_version_that_reads_beyond_what_there_is_tries_nothing(bundle, monkeypatch):
    monkeypatch.setattr(trial_child, "OLDEST", (99, 1))
    asked = trial_child.Opening(str(bundle), ("step-4",), False, "fast")
    said = msgspec.msgpack.decode(trial_child.answer(msgspec.msgpack.encode(asked)), type=trial_child.Answer)
    assert said.kind == "BackendError"
    assert said.error.endswith(", expected 99.1 or newer for a trial; install that")


def test_a_bundle_that_is_replaced_between_its_trial_and_its_opening_is_refused(bundle, tmp_path):
    path = copied(bundle, tmp_path / "a.txl")
    model = txl_runtime.load(path, trial=True)
    path.rename(tmp_path / "old.txl")
    copied(bundle, path)
    with pytest.raises(
        BundleError, match=r"was replaced since its trial began, .*; load it again$|is not the file that"
    ):
        model.stream().run(segment(model, 4, 3))
    assert not tried(model)._engines


@pytest.mark.parametrize("backend", ["rtx", "tensorrt", "cuda"])
def test_a_device_tries_nothing(bundle, backend):
    with pytest.raises(UsageError, match=f"backend is {backend}, and a trial .* expected auto or cpu; leave"):
        txl_runtime.load(bundle, backend, trial=True)


def test_the_best_backend_with_a_trial_is_the_cpu():
    model = txl_runtime.load(frozen("ring"), trial=True)
    assert model.backend.name == "cpu"
    assert model.backend.description.endswith(", each size after a trial")
    assert set(model.backend_notes.values()) == {"a trial runs on the CPU alone"}


@pytest.mark.parametrize("trial", [None, 1, "yes", (2**29,)])
def test_what_is_no_trial_is_refused(bundle, trial):
    with pytest.raises(UsageError, match=r"trial is .*, expected True, False or .*Bounds; give that"):
        txl_runtime.load(bundle, trial=trial)


def test_closing_a_model_ends_its_process(bundle):
    model = txl_runtime.load(bundle, trial=True)
    stream, process = model.stream(), tried(model)._process._process
    stream.run(segment(model, 4, 3))
    assert process.poll() is None
    model.close()
    until(lambda: process.poll() is not None)


def test_threads_share_a_model(bundle):
    model, expected = txl_runtime.load(bundle, trial=True), txl_runtime.load(bundle)
    wrong: list[object] = []

    def go(seed: int) -> None:
        streams = model.stream(), expected.stream()
        for length in (1, 4, 2, 1, 3):
            found, wanted = (stream.run(segment(model, length, 3, seed)) for stream in streams)
            if found["logits"].tobytes() != wanted["logits"].tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FAST = ("3 GB of zeros", "no groups", "endless loop")
RUN = {
    "a range that wraps in its type",
    "sums of many axes",
    "constants multiplied",
    "constants multiplied that are shapes",
    "an empty value of 2^80",
    "an empty value of 2^62",
    "remainders of fractions",
    "one image of one channel, laid out in blocks",
}
"""Attacks that run within the bounds, so they run here, too: the constants in 16 and 2 s, the others within 1 s."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow(keep=6)) for name in HOSTILE]
)
def test_an_attack_ends_in_one_line_or_runs_within_the_bounds(bundle, tmp_path, name):
    found = attacked(bundle, tmp_path / "a.txl", name)
    assert found.where == ("structure" if name not in TRIED else "ran" if name in RUN else "trial"), found.said
    assert found.seconds < 1 or name in RUN


def test_a_trial_begins_with_the_states_that_the_bundle_begins_with(monkeypatch):
    """Faults that follow from them, such as a division by what only they hold, are seen there."""
    for name in ("OPENED", "STARTS"):
        monkeypatch.setattr(trial_child, name, {})
    bundle = open_bundle(frozen("axes"))
    names = tuple(program.name for program in bundle.manifest.programs)
    asked = trial_child.Opening(str(bundle.path), names, False, "plain")
    answer = msgspec.msgpack.decode(trial_child.answer(msgspec.msgpack.encode(asked)), type=trial_child.Answer)
    assert answer.error == ""
    begun = txl_runtime.load(frozen("axes"), "cpu").stream().state()
    for state in bundle.manifest.states:
        kind, whole = np.dtype(state.dtype).str, begun[state.name]
        assert np.array_equal(trial_child._array(state.input, trial_child.Tensor(kind, state.shape)), whole), state.name
    assert any(np.any(start) for start in trial_child.STARTS.values()), "some do not begin with zeros"
