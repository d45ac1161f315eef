"""The compiled step in C++: Python's bits with the same library, and what a host may name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from building import done
from frozen import frozen
from native_steps import best, compiled, ragged
from txl_engines.native import build_native
from txl_runtime import StreamState, load
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.native.opening import SIDECAR, STEP

from conformance.driver import packed, packed_bytes, unpacked, unpacked_bytes
from conformance.talking import Talk

pytestmark = [pytest.mark.slow(keep=7), pytest.mark.timeout(1200)]  # whoever comes first builds


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "long, learned, norms before": (
        {"memory_length": 150, "attn_type": 1, "position_rows": 5, "pre_lnorm": True, "final_norm": True},
        {"segment_length": (70, 1)},
    ),
    "odd, projected, divided": (
        {"cutoffs": (10, 33), "d_embed": 40, "div_val": 2, "d_head": 5, "d_model": 18, "same_length": True},
        {"segment_length": (6, 1)},
    ),
    "int8 by columns": ({}, {"segment_length": (6, 1), "precision": "int8"}),
    "single steps, gelu": ({"memory_length": 9, "activation": "gelu"}, {"segment_length": (8, 1), "lookup": True}),
}
"""Models beyond those that are kept: changes of the config, and options of the export."""


@pytest.fixture
def stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_bundle: Callable[..., Path]) -> Any:
    """Makes copies of bundles with a compiled step; without ONNX Runtime for the driver, which needs none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TXL_ONNXRUNTIME", "/nowhere")
    library = compiled(best())
    monkeypatch.setattr("txl_engines.native.compile_step", lambda command, path, *_: shutil.copy(library, path))

    def make(name: str, cache: str = "fp32") -> Path:
        config, options = FORMS.get(name, ({}, {}))
        source = make_bundle(config, batch_size=3, verify=False, **options) if name in FORMS else frozen(name)
        bundle = Path(shutil.copytree(source, tmp_path / f"{name}.txl"))
        build_native(bundle, cache)
        return bundle

    return make


def opened(c: Talk, bundle: Path, b: int, **given: Any) -> None:
    for request in (
        {"do": "load", "path": str(bundle), "native_library": str(bundle / STEP), **given},
        {"do": "open", "b": b, "memory_length": None},
    ):
        assert "ok" in (reply := c.ask(request)), reply


@pytest.mark.parametrize("cache", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["ring", "clusters", "zeros", "int8", *FORMS])
def test_it_gives_pythons_bits_and_goes_on_where_python_stopped(
    built: Path, stepped: Any, name: str, cache: str
) -> None:
    """Over ragged segments with idle sequences and resets, states included; then each goes on from the other's."""
    bundle = stepped(name, cache)
    model = load(bundle, "native", threads=1)
    stream, b = model.stream(), model.batch_size
    with Talk([str(built / "txl-driver")], 60.0) as c:
        opened(c, bundle, b)

        def same(do: str, tokens: np.ndarray, lengths: np.ndarray, **options: Any) -> None:
            inputs, more = {"tokens": tokens.astype(np.int32)}, {"counts": lengths.tolist(), **options}
            expected = getattr(stream, do)(inputs, lengths, **options)
            given = {entry: packed(array) for entry, array in inputs.items()}
            found = c.ask({"do": do, "inputs": given, **more})["ok"]["outputs"]
            assert {key: unpacked(array).tobytes() for key, array in found.items()} == {
                key: array.tobytes() for key, array in expected.items()
            }

        for number, (tokens, lengths) in enumerate(ragged(model, 40)):
            same("feed", tokens, lengths)
            if number % 4 == 3:  # a part of a segment
                few = np.minimum(lengths, model.segment_lengths[0])
                same("run", tokens[:, : max(few.max(), 1)], few, commit=False)
                stream.commit(few // 2)
                assert "ok" in c.ask({"do": "commit", "counts": (few // 2).tolist()})
            if number % 15 == 14:
                stream.reset([0])
                c.ask({"do": "reset", "rows": [0]})
            held = c.ask({"do": "state"})["ok"]
            assert held["states"] == {entry: packed(array) for entry, array in stream.state().items()}
            assert held["fill"] == stream.fill.tolist()
        tokens, lengths = next(ragged(model, 1, seed=9))
        saved = unpacked_bytes(c.ask({"do": "save"})["ok"]["bytes"])
        assert StreamState.from_bytes(saved).fill.tolist() == stream.fill.tolist()
        other = load(bundle, "cpu", threads=1).stream()
        other.restore(StreamState.from_bytes(saved))
        wanted = other.feed(tokens, lengths)
        assert np.abs(stream.feed(tokens, lengths) - wanted).max() < (1e-5 if cache == "fp32" else 0.1)
        assert "ok" in c.ask({"do": "restore", "bytes": packed_bytes(other.snapshot().to_bytes())})
        stream.restore(other.snapshot())
        same("feed", tokens, lengths)
        assert c.ask({"do": "selftest"})["ok"]["passed"]


def test_it_draws_and_scores_as_python_does(built: Path, stepped: Any) -> None:
    bundle = stepped("ring")
    stream = load(bundle, "native", threads=1).stream(2)
    tokens = np.array([[5, 3, 8, 1, 2], [2, 7, 7, 4, 0]], np.int32)
    with Talk([str(built / "txl-driver")], 60.0) as c:
        opened(c, bundle, 2)
        assert np.array_equal(
            unpacked(c.ask({"do": "score", "tokens": packed(tokens)})["ok"]["nll"]), stream.score(tokens)
        )
        request = {"do": "generate", "tokens": packed(tokens), "count": 12, "temperature": 0.8, "top_k": 9, "seed": 3}
        found = c.ask(request)["ok"]
    drawn = [*stream.generate(tokens, 12, temperature=0.8, top_k=9, seed=3)]
    assert np.array_equal(unpacked(found["tokens"]), drawn)


def test_a_prepared_step_takes_no_memory_of_its_own(built: Path, stepped: Any) -> None:
    for name in ("ring", "clusters"):
        bundle = stepped(name)
        assert done([built / "txl-real-time", bundle, bundle / STEP]) == "0 allocations\n"


def test_without_the_option_no_step_of_a_bundle_is_taken(built: Path, stepped: Any) -> None:
    bundle = stepped("ring")
    with Talk([str(built / "txl-driver")], 60.0) as c:
        assert "ONNX Runtime cannot be opened" in c.ask({"do": "load", "path": str(bundle)})["refused"]


def said(c: Talk, bundle: Path, library: Path | None = None, **options: Any) -> str:
    given = {"do": "load", "path": str(bundle), "native_library": str(library or bundle / STEP), **options}
    return str(c.ask(given).get("refused"))


def with_facts(bundle: Path, **changes: Any) -> Path:
    """Change a sidecar, with the manifest after it: its own hash is not what is to be found."""
    path, manifest = bundle / SIDECAR, json.loads((bundle / "manifest.json").read_text())
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | changes))
    manifest["files"][SIDECAR] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return bundle


def test_a_library_that_is_not_the_verified_one_is_refused_before_its_code_runs(
    built: Path, stepped: Any, tmp_path: Path
) -> None:
    bundle = stepped("ring")
    other = tmp_path / "other.so"
    other.write_bytes((bundle / STEP).read_bytes() + b"x")
    with Talk([str(built / "txl-driver")], 60.0) as c:
        assert "its SHA-256 is not that of" in said(c, bundle, other)
        assert "is no file, expected a compiled step" in said(c, bundle, tmp_path / "none.so")
        assert "a ring and a copy of the weights" in said(c, bundle, update="rolled")
        assert "engines/native/step.json: missing" in said(c, frozen("ring"), other)
        assert "precision is fp16, expected fp32 or int8" in said(c, frozen("half"), other)
        for changes, words in (
            ({"platform": "Linux-riscv64"}, "was compiled for Linux-riscv64 with"),
            ({"instructions": "avx1024"}, "with avx1024, this is"),
            ({"cache": "int2"}, "keys and values are in int2, expected fp32 or fp16"),
            ({"weights": "0" * 64}, "is of different weights"),
            ({"sha256": "0" * 64}, "its SHA-256 is not that of"),
            ({"cache": 7}, "is damaged"),
        ):
            assert words in said(
                c, with_facts(Path(shutil.copytree(bundle, tmp_path / f"{len(words)}.txl")), **changes)
            )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_head": 4, "d_head": 2}, "not those of its config"),
        ({"n_layer": 1}, "not those of its config"),
        ({"d_model": 16}, "not those of its config"),
        ({"vocab_size": 40}, "not those of its config"),
        ({"d_inner": 13}, "inner.weight is F32 [8, 12], expected F32 [8, 13]"),
        ({"d_inner": -1}, "d_inner is -1, expected at least 1"),
        ({"activation": "tanh"}, "activation is tanh"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_c_sees_an_array(
    built: Path, stepped: Any, change: dict[str, Any], words: str
) -> None:
    bundle = stepped("ring")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["family"]["config"] |= change
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with Talk([str(built / "txl-driver")], 60.0) as c:
        assert words in said(c, bundle)
