"""The step in C computes what ONNX Runtime does with the same bundle, in every form of a model that it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frozen import frozen
from native_steps import best, compiled, largest, pair, ragged
from oracle import LANGUAGE_MODELS, export_case, refuses_kv
from safetensors.numpy import save_file
from txl_engines.native import find_compiler
from txl_runtime import load
from txl_runtime.errors import BackendError, BundleError
from txl_runtime.ladder import chain_limit
from txl_runtime.native.engine import CACHES, NativeEngine, unsupported
from txl_runtime.native.opening import FLAGS
from txl_runtime.native.parameters import Blocks, Matrix, Parameters

FORMS = {
    "clamp, gelu, norms before": ({"clamp_length": 3, "activation": "gelu", "final_norm": True, "pre_lnorm": True}, {}),
    "clamp of 0, gelu by tanh": ({"clamp_length": 0, "activation": "gelu_tanh"}, {}),
    "window, odd sizes": ({"same_length": True, "d_head": 5, "d_model": 18, "d_embed": 18}, {}),
    "one wide head": ({"n_layer": 1, "n_head": 1, "d_head": 70}, {}),
    "learned distances": ({"attn_type": 1, "position_rows": 5}, {}),
    "projected clusters": ({"cutoffs": (10, 33), "d_embed": 40}, {}),
    "single steps": ({"memory_length": 9}, {"segment_length": (8, 1), "lookup": True}),
    "long segments": ({"memory_length": 150}, {"segment_length": (70, 1)}),
}
"""Models beyond those that are kept: changes of the config, and options of the export."""


@pytest.mark.parametrize("instructions", FLAGS)
@pytest.mark.parametrize("name", ["ring", "clusters", "zeros", "int8"])
def test_a_kept_bundle_gives_what_onnx_runtime_gives(name, instructions):
    assert largest(*pair(frozen(name), instructions)) < 1e-5


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_model_gives_what_onnx_runtime_gives(make_bundle, name):
    config, options = FORMS[name]
    path = make_bundle(config, batch_size=3, verify=False, **{"segment_length": (6, 1)} | options)
    assert largest(*pair(path)) < 1e-5


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_every_oracle_case_gives_what_onnx_runtime_gives(case, tmp_path):
    if refuses_kv(case):
        return
    export_case(case, "kv", tmp_path)
    if "ring" in load(tmp_path / "model.txl", "cpu").manifest.updates:
        assert largest(*pair(tmp_path / "model.txl")) < 1e-5


def test_all_instructions_and_numbers_of_threads_round_alike():
    """int8 exactly: its sums are of integers. Sums of float32 only where the processor multiplies and adds at once."""
    made = []
    for instructions, threads in ((best(), 1), (best(), 3), ("avx2", 1), ("plain", 1)):
        stream = pair(frozen("ring"), instructions, threads=threads)[1].stream()
        made.append([stream.feed(*segment) for segment in ragged(load(frozen("ring"), "cpu"), 12)])
    for one, three, avx2, plain in zip(*made, strict=True):
        assert np.array_equal(one, three)
        assert np.allclose(one, avx2, atol=1e-5)
        assert np.allclose(one, plain, atol=1e-5)


@pytest.mark.parametrize(
    ("weights", "cache"), [("fp32", "fp32"), ("fp32", "fp16"), ("int8", "int8"), ("bf16", "fp16"), ("int4", "int8")]
)
def test_a_neighbour_changes_no_bit_of_a_sequence(make_bundle, weights, cache):
    """Neither what the others are fed, nor that they run at all, nor NaN in their memory."""
    model = pair(low_bundle(make_bundle, weights), cache=cache, bf16=weights == "bf16")[1]
    alone, among, beside = model.stream(1), model.stream(), model.stream()
    for tokens, lengths in ragged(model, 20):
        lengths = np.maximum(lengths, 1)
        expected = alone.feed(tokens[:1], lengths[:1])
        assert np.array_equal(among.feed(tokens, lengths)[:1], expected)
        state = beside.take(1)
        for array in state.tensors.values():
            array[...] = np.nan
        beside.put(1, state)
        assert np.array_equal(beside.feed(tokens, lengths)[:1], expected)


PRECISIONS = [("fp32", "int8"), ("bf16", "fp32"), ("bf16", "fp16"), ("bf16", "int8"), ("int8", "int8")]
PRECISIONS += [("int4", cache) for cache in CACHES]


@pytest.mark.parametrize("instructions", FLAGS)
@pytest.mark.parametrize(("weights", "cache"), PRECISIONS)
def test_every_precision_stays_beside_onnx_runtime(make_bundle, weights, cache, instructions):
    """In segments of 40, which multiply keys and values as segments do, and single tokens. Random weights are sharper
    than trained ones, so the limit is a twentieth of what two ways to compute one function may differ by."""
    expected, found = pair(low_bundle(make_bundle, weights), instructions, cache, bf16=weights == "bf16")
    one, other = expected.stream(), found.stream()
    divergences, limit = [], chain_limit(found.backend.precision or weights, real=False) / 20
    for number, (tokens, lengths) in enumerate(ragged(expected, 30)):
        if number % 3 == 2:
            tokens, lengths = tokens[:, :1], np.minimum(lengths, 1)
        if number % 13 == 12:
            one.reset([1])
            other.reset([1])
        wanted, given = one.feed(tokens, lengths), other.feed(tokens, lengths)
        counts = np.arange(tokens.shape[1]) < lengths[:, None]
        wanted, given = (np.float64(part[counts]) for part in (wanted, given))
        divergences.append((np.exp(wanted) * (wanted - given)).sum(axis=-1))
    assert np.concatenate(divergences).mean() < limit
    memory, held = one.memory(), other.memory()
    errors = [np.square(memory[name] - held[name]).mean() ** 0.5 / memory[name].std() for name in memory]
    assert 0 < max(errors) < (0.05 if weights == "int4" else 0.02)  # rounding, and no wrong row


@pytest.mark.parametrize("d_head", [16, 10])
def test_int4_is_multiplied_exactly(make_bundle, d_head):
    """Blocks of 32 that heads of 10 columns do not divide, too: against the same codes in float32 in NumPy."""
    bundle = load(low_bundle(make_bundle, "int4", d_head=d_head), "cpu").bundle
    parameters, config = Parameters(bundle), bundle.manifest.config
    width, size = config.n_head * config.d_head, config.d_model
    for name, rows, columns in (("query_key_value", size, 3 * width), ("output", width, size)):
        blocks = parameters.matrix(f"layers.00.attention.{name}.weight", rows, columns)
        assert isinstance(blocks, Blocks)
        whole = low_bundle(make_bundle, "fp32", d_head=d_head)
        exact = Parameters(load(whole, "cpu").bundle).matrix(f"layers.00.attention.{name}.weight", rows, columns)
        step = np.repeat(blocks.scales, 2 * blocks.codes.shape[2], axis=1)[:, :rows].T
        assert (np.abs(blocks.plain().values - exact.values) <= 0.51 * step + 1e-6).all()
    assert isinstance(blocks.padded(0, config.n_head, d_head), Matrix if d_head % 16 else Blocks)


@pytest.mark.parametrize("block", [16, 1024])
def test_int4_blocks_that_the_step_has_no_room_for_are_refused(make_bundle, tmp_path, monkeypatch, block):
    """A stranger's file may have any; with blocks of 16 and 1024 a row's sums and codes went beyond their buffers."""
    bundle, path = load(low_bundle(make_bundle, "int4"), "cpu").bundle, tmp_path / "weights.safetensors"
    save_file({"x.int4": np.zeros((8, 1, block // 2), np.uint8)}, path)
    parameters = Parameters(bundle)
    monkeypatch.setattr(parameters, "_path", path)
    with pytest.raises(BackendError, match=f"x has blocks of {block}, expected 32, 64 or 128"):
        parameters.matrix("x", block, 8)


def low_bundle(make_bundle, weights, **more):
    """A bundle of three sequences whose segments of 40 are long for the step; bf16 is rounded from fp32."""
    sizes = {"n_layer": 2, "n_head": 3, "d_head": 16, "d_model": 40, "d_embed": 40, "d_inner": 70, "memory_length": 70}
    precision = "fp32" if weights == "bf16" else weights
    options = {"segment_length": (40, 1), "batch_size": 3, "precision": precision, "verify": False}
    return make_bundle(sizes | more, **options)


@pytest.mark.parametrize(("weights", "cache"), [("fp32", "int8"), ("bf16", "fp32"), ("bf16", "int8"), ("int4", "int8")])
def test_snapshots_pass_between_onnx_runtime_and_every_precision(make_bundle, weights, cache):
    """Outside they are float32. What int8 kept is kept again as it was: the stream goes on bit by bit."""
    expected, found = pair(low_bundle(make_bundle, weights), cache=cache, bf16=weights == "bf16")
    one, other, third = expected.stream(), found.stream(), found.stream()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, expected.vocab_size, (3, 95))
    other.feed(tokens)
    third.restore(other.snapshot())
    assert np.array_equal(third.feed(tokens[:, :50]), other.feed(tokens[:, :50]))
    third.put(1, other.take(1))
    assert all(np.array_equal(third.memory()[name][1], held[1]) for name, held in other.memory().items())
    one.restore(other.snapshot())
    assert np.abs(one.feed(tokens[:, :1]) - other.feed(tokens[:, :1])).mean() < 0.05
    other.restore(one.snapshot())
    assert np.abs(one.feed(tokens[:, :60]) - other.feed(tokens[:, :60])).mean() < 0.05


def test_half_precision_of_keys_and_values_changes_little():
    expected, found = pair(frozen("ring"), cache="fp16")
    one, other = expected.stream(), found.stream()
    worst = max(np.abs(one.feed(*s) - other.feed(*s)).max() for s in ragged(expected, 20))
    assert 1e-6 < worst < 1e-2
    assert "keys and values in fp16" in found.backend.description


@pytest.mark.parametrize("instructions", FLAGS)
def test_half_precision_rounds_as_numpy_does(instructions):
    """A state that is put and taken again went through float16 in NumPy; one that a step wrote, in C."""
    model = pair(frozen("ring"), instructions, "fp16")[1]
    plain = pair(frozen("ring"), instructions)[1]
    one, other = plain.stream(), model.stream()
    tokens = np.arange(3 * model.batch_size).reshape(model.batch_size, 3)
    one.feed(tokens)
    other.feed(tokens)
    key = "layers.00.key"  # of the first layer: what it is computed from is the same
    assert np.array_equal(one.memory()[key].astype(np.float16), other.memory()[key])


def test_the_stream_works_as_on_any_engine():
    """Scores, draws, snapshots between the two engines, a part of a segment, and copies of one sequence."""
    expected, found = pair(frozen("ring"))
    one, other = expected.stream(), found.stream()
    tokens = np.random.default_rng(1).integers(0, expected.vocab_size, (3, 13))
    assert np.allclose(one.score(tokens), other.score(tokens), atol=1e-5)
    other.restore(one.snapshot())
    assert np.allclose(one.feed(tokens), other.feed(tokens), atol=1e-5)
    one.restore(other.snapshot())
    assert np.array_equal(one.fill, other.fill)
    drawn, wanted = ([*stream.generate(tokens[:, :2], 9, temperature=0)] for stream in (other, one))
    assert np.array_equal(drawn, wanted)
    for stream in (one, other):
        stream.run({"tokens": tokens[:, :4].astype(np.int32)}, commit=False)
        stream.commit([1, 4, 0])
        stream.select([1, 0, 1])
        stream.put(2, stream.take(0))
    memory = one.memory()
    assert all(np.allclose(memory[name], held, atol=1e-5) for name, held in other.memory().items())
    assert np.allclose(one.feed(tokens), other.feed(tokens), atol=1e-5)


def test_a_bundle_of_a_different_kind_is_refused_by_name():
    for name, said in {"hidden": "not a ring", "half": "precision is fp16"}.items():
        bundle = load(frozen(name), "cpu").bundle
        assert said in unsupported(bundle)
        with pytest.raises(BackendError, match=said):
            NativeEngine(bundle, compiled(best()), 1, "fp32")


def test_a_tensor_that_does_not_fit_the_config_is_named():
    """Before its address is given to C."""
    bundle = load(frozen("ring"), "cpu").bundle
    bundle.manifest.family["config"]["d_inner"] = 13
    with pytest.raises(BundleError, match=r"layers\.00\.feed_forward\.inner\.weight is F32 \[8, 12\], expected .*13\]"):
        NativeEngine(bundle, compiled(best()), 1, "fp32")


@pytest.mark.parametrize("change", [{"n_head": 4, "d_head": 2}, {"n_layer": 1}, {"d_model": 16}, {"vocab_size": 40}])
def test_tables_that_are_not_the_configs_are_refused_before_c_sees_an_array(change):
    bundle = load(frozen("ring"), "cpu").bundle
    bundle.manifest.family["config"] |= change
    with pytest.raises(BundleError, match="not those of its config"):
        NativeEngine(bundle, compiled(best()), 1, "fp32")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_steps_without_the_threads_of_its_parent():
    code = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parents[2] / "helpers"), str(Path(__file__).parents[2])]!r}
from frozen import frozen
from native_steps import pair
model = pair(frozen("ring"), threads=2)[1]
model.stream().feed([[1, 2]] * model.batch_size)
child = os.fork()
if not child:
    model.stream().feed([[1, 2]] * model.batch_size)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    compiled(best(), "-DTXL_SHARED=0")  # skips where there is no compiler
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["7"], ran.stderr[-2000:]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("kinds", "name"), [("address,undefined", "libasan.so"), ("thread", "libtsan.so")])
def test_the_step_is_clean_under_the_sanitizers(make_bundle, kinds, name):
    """On ragged segments of every kept bundle and precision, with two threads, in plain C and the best instructions."""
    command = [find_compiler()[0], f"-print-file-name={name}"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"the compiler has no {name} to load first, as GCC does")
    flags = (f"-fsanitize={kinds}", "-fno-sanitize-recover=all", "-DTXL_SHARED=0", "-O1", "-g")
    libraries = [str(compiled(instructions, *flags)) for instructions in {best(), "plain"}]
    environment = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66"}
    bundles = [*(frozen(name) for name in ("ring", "clusters", "zeros", "int8"))]
    bundles += [low_bundle(make_bundle, precision) for precision in ("fp32", "int4")]
    command = [sys.executable, "-c", SANITIZED, *libraries, "bundles", *map(str, bundles)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["clean"]


SANITIZED = f"""
import sys
sys.path += {[str(Path(__file__).parents[2] / "helpers"), str(Path(__file__).parents[2])]!r}
from pathlib import Path
import numpy as np
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.native.opening import open_step
from txl_runtime.streaming.state import initial_values
from txl_runtime.streaming.stream import Stream

libraries, bundles = sys.argv[1 : sys.argv.index("bundles")], sys.argv[sys.argv.index("bundles") + 1 :]
for library in libraries:
    for path in bundles:
        bundle = open_bundle(path)
        manifest, ways = bundle.manifest, [("fp32", False), ("fp16", False), ("int8", False)]
        ways += [("fp16", True), ("int8", True)] * (manifest.precision == "fp32")
        for cache, bf16 in ways:
            backend = open_step(bundle, Path(library), cache, 2, bf16=bf16)
            stream = Stream(manifest, backend.open_loop(manifest, initial_values(bundle)), "ring", manifest.batch_size)
            rng, longest = np.random.default_rng(0), 2 * max(manifest.segment_lengths)
            for _ in range(20):
                tokens = rng.integers(0, manifest.vocab_size, (manifest.batch_size, longest))
                assert np.isfinite(stream.feed(tokens, rng.integers(0, longest, manifest.batch_size))).all()
print("clean")
"""
