"""The self-test passes on what was exported and on nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen import frozen
from resealing import copied, reseal
from safetensors.numpy import load_file, save_file
from txl_runtime import BundleError, CheckError, load
from txl_runtime.bundle.manifest import OLD_SELFTEST
from txl_runtime.bundle.reading import SELFTEST
from txl_runtime.ladder import rung
from txl_runtime.selftest import SelftestResult, relative_difference, run_selftest

Vectors = dict[str, Any]


@pytest.fixture
def bundle(tmp_path):
    """A copy that may be damaged."""
    return copied(frozen("ring"), tmp_path / "a bundle.txl")


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("ring", "ring"),
        ("ring", "rolled"),
        ("hidden", None),
        ("zeros", "ring"),
        ("zeros", "rolled"),
        ("clusters", None),
    ],
)
def test_a_bundle_passes_with_one_to_all_live_streams(name, update):
    model = load(frozen(name), update=update)
    result = run_selftest(model)
    assert result.passed
    result.require()
    assert result.streams == tuple(range(1, model.batch_size + 1))
    assert result.steps >= 6
    assert 0 < result.largest["logprobs"] < 1e-5
    assert 0 < result.largest["memory"] < 1e-5
    limits = rung("fp32", "cpu")
    assert result.limits == {"logprobs": limits.logprobs, "memory": limits.memory}
    named = "backend steps streams max_logprobs max_memory limit_logprobs limit_memory passed"
    assert list(result.document()) == named.split()


def scale_tensor(path: Path, name: str, factor: float) -> None:
    """Multiply one tensor in place; nothing else in the file moves."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])[name]
    assert entry["dtype"] == "F32"
    first, last = (start + offset for offset in entry["data_offsets"])
    data[first:last] = (np.frombuffer(data[first:last], np.float32) * np.float32(factor)).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "factor", "update"),
    [
        ("embedding.tables.0", 1.01, "ring"),
        ("embedding.tables.0", np.nan, "rolled"),
        ("layers.00.attention.query_key_value.weight", 1.01, "rolled"),
        ("layers.00.attention.position.table.00010", 1.01, "ring"),
        ("layers.01.attention.output.weight", 1.01, "ring"),
        ("layers.01.feed_forward.norm.bias", np.nan, "ring"),
        ("layers.01.feed_forward.norm.bias", 1.01, "rolled"),
    ],
)
def test_a_slightly_changed_weight_fails(bundle, name, factor, update):
    scale_tensor(bundle / "weights.safetensors", name, factor)
    reseal(bundle)
    result = run_selftest(load(bundle, update=update))
    assert not result.passed
    with pytest.raises(CheckError, match=r"self-test failed on ONNX Runtime .*; do not use this bundle here") as caught:
        result.require()
    assert caught.value.exit_code == 1
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("logprobs", "memory", "passed"),
    [(1e-4, 1e-4, True), (1.1e-4, 0.0, False), (0.0, 1.1e-4, False), (float("inf"), 0.0, False)],
)
def test_a_result_passes_up_to_its_limits_and_not_beyond(logprobs, memory, passed):
    largest, limits = {"logprobs": logprobs, "memory": memory}, {"logprobs": 1e-4, "memory": 1e-4}
    result = SelftestResult("an engine", 9, (1,), largest, limits)
    assert result.passed is passed
    if not passed:
        with pytest.raises(CheckError, match="self-test failed on an engine"):
            result.require()


@pytest.mark.parametrize("key", ["logprobs", "memory/layers.01.value"])
@pytest.mark.parametrize("value", [np.nan, 1.0])
def test_another_expectation_fails(bundle, key, value):
    def change(vectors: Vectors) -> None:
        vectors[key].reshape(-1)[-1] = vectors[key].reshape(-1)[-1] + value

    rewrite(bundle, change)
    assert not run_selftest(load(bundle)).passed


# --- vectors that cannot be used ----------------------------------------------------------------------------------


def rewrite(bundle: Path, change: Callable[[Vectors], object]) -> None:
    vectors = load_file(bundle / SELFTEST)
    change(vectors)
    if all(np.asarray(values).dtype.kind in "biuf" for values in vectors.values()):
        save_file({name: np.asarray(values, order="C") for name, values in vectors.items()}, bundle / SELFTEST)
        reseal(bundle)
    else:  # which only the archives of older bundles can hold
        np.savez(bundle / OLD_SELFTEST, **vectors)
        reseal(bundle, selftest=OLD_SELFTEST)


def unusable(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        run_selftest(load(bundle))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.endswith("; export the model again")
    return message


def set_to(key: str, value: Any) -> Callable[[Vectors], object]:
    return lambda vectors: vectors.update({key: value(vectors[key]) if callable(value) else value})


CHANGES: dict[str, Callable[[Vectors], object]] = {
    "no tokens": lambda vectors: vectors.pop("tokens"),
    "no lengths": lambda vectors: vectors.pop("length"),
    "no memory of one state": lambda vectors: vectors.pop("memory/layers.01.value"),
    "tokens out of range": set_to("tokens", lambda old: old + 41),
    "tokens are text": set_to("tokens", np.array(["a", "b"])),
    "tokens of another batch": set_to("tokens", lambda old: old[:, :2]),
    "lengths are text": set_to("length", lambda old: old.astype(str)),
    "lengths are one number": set_to("length", np.int32(4)),
    "more steps than tokens": set_to("tokens", lambda old: old[:2]),
    "no step at all": set_to("length", lambda old: old[:0]),
    "counts beyond the segment": set_to("counts", lambda old: old + 5),
    "only idle steps": set_to("counts", lambda old: old * 0),
    "positions out of range": set_to("positions", lambda old: old - 9),
    "positions are fractions": set_to("positions", lambda old: old + 0.5),
    "columns out of range": set_to("columns", lambda old: old + 41),
    "no columns": lambda vectors: vectors.update(columns=vectors["columns"][:0], logprobs=vectors["logprobs"][..., :0]),
    "fewer columns expected": set_to("logprobs", lambda old: old[..., :5]),
    "log-probabilities are text": set_to("logprobs", lambda old: old.astype(str)),
    "memory of another shape": set_to("memory/layers.01.value", lambda old: old[..., :3]),
    "memory of fewer streams": set_to("memory/layers.01.value", lambda old: old[:2]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_vectors_that_do_not_fit_are_refused(bundle, change):
    rewrite(bundle, change)
    assert "stored vectors" in unusable(bundle)


def test_a_pickled_object_among_the_vectors_is_never_opened(bundle):
    rewrite(bundle, set_to("tokens", np.array([{"an": "object"}], dtype=object)))
    assert "declares object [1]" in unusable(bundle)


@pytest.mark.parametrize("data", [b"", b"not an archive", b"PK\x05\x06" + bytes(18), b"\x80\x04N."])
def test_a_file_that_holds_no_vectors_is_refused(bundle, data):
    (bundle / SELFTEST).write_bytes(data)
    reseal(bundle)
    assert "stored vectors" in unusable(bundle)


def test_a_bundle_without_vectors_is_refused(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text("utf-8"))
    del manifest["files"][SELFTEST], manifest["selftest"]
    (bundle / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    (bundle / SELFTEST).unlink()
    with pytest.raises(BundleError, match=r"holds no selftest\.safetensors, expected the vectors export"):
        run_selftest(load(bundle))


@pytest.mark.parametrize(
    ("expected", "found", "nats", "apart"),
    [
        ([-1e4, 0.5], [-1e4, 0.51], False, 0.01),
        ([-1e4, 0.5], [-1.01e4, 0.5], False, 0.01),
        ([50, 0.5], [50, 1.0], False, 0.01),
        ([-50, -0.5], [-50, -0.51], True, 0.01),
        ([0.5, np.inf], [0.5, 1e30], False, np.inf),
        ([0.5], [np.nan], False, np.inf),
    ],
)
def test_one_large_value_does_not_hide_what_differs_beside_it(expected, found, nats, apart):
    values = np.array(found, np.float32), np.array(expected, np.float32)
    assert relative_difference(*values, nats=nats) == pytest.approx(apart, rel=1e-3)
