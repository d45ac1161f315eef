"""A Transformer-XL's own step in plain C: every kind of it, on every processor, and what stays with the generator."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
from aarch64 import MARCH, emulated
from plain_c import BUNDLES, build, need, run
from txl_runtime.errors import CheckError
from txl_runtime.native.library import Shape
from txl_runtime.native.parameters import Matrix

from txl_deploy.plain_c import package
from txl_deploy.plain_c.native import Packed
from txl_deploy.plain_c.package import package_c

ALLOWED = {"memcpy", "memset", "memmove", "expf", "logf", "tanhf", "sqrtf", "erff"}
KINDS = {"ring": 3, "clusters": 2, "zeros": 3, "int8": 2}
"""Bundles, and the B of their packages."""
FORMS = {
    "clamp, gelu, norms before": {"clamp_length": 3, "activation": "gelu", "final_norm": True, "pre_lnorm": True},
    "window, odd sizes": {"same_length": True, "d_head": 5, "d_model": 18, "d_embed": 18},
    "learned distances": {"attn_type": 1, "position_rows": 5},
    "projected clusters": {"cutoffs": (10, 33), "d_embed": 40},
    "clusters of widths": {"cutoffs": (10, 33), "div_val": 2, "d_embed": 40},
    "long memory": {"memory_length": 150},
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """A package of each kind; one of them has its weights in a file."""
    need("cc")
    out, batch = tmp_path_factory.mktemp("native") / "c", KINDS[request.param]
    return package_c(
        BUNDLES / request.param, out, name="model", batch_size=batch, weights_file=request.param == "zeros"
    )


def test_a_transformer_xl_is_the_native_step_and_calls_nothing_but_mathematics(kind, tmp_path):
    need("nm")
    text, header = (kind.folder / "model.c").read_text(), (kind.folder / "model.h").read_text()
    assert "txl_step" in text
    assert "emx" not in text + (kind.folder / "README.md").read_text()
    assert re.search(r"float keys\[\d\]", header)
    compiled = build(kind.folder, tmp_path / "model.o", "-c", kind.folder / "model.c", flags="-O1")
    listed = [line.split()[-2:] for line in run(Path("/usr/bin/env"), "nm", compiled).splitlines()]
    assert {name for sort, name in listed if sort == "U"} <= ALLOWED
    assert {name for sort, name in listed if sort in "TDBC"} == {"model_init", "model_step", "model_reset"}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "flags",
    [
        "-O2 -march=native -Wall -Wextra -Werror",
        "-O1 -Wall -Wextra -Werror",
        "-O1 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math",
        "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all",
        "-g -O1 -march=native -fsanitize=address,undefined -fno-sanitize-recover=all",
    ],
    ids=["native", "plain", "any order of sums", "sanitized plain", "sanitized native"],
)
def test_its_own_test_passes_under_all_flags(kind, flags, tmp_path):
    sources = (kind.folder / "test_model.c", kind.folder / "model.c")
    program = build(kind.folder, tmp_path / "replayed", *sources, flags=flags)
    weights = [kind.folder / "model.weights"] * (kind.folder / "model.weights").exists()
    assert run(program, *weights, env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}).startswith("passed: 8 steps")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("flags", [[MARCH], []], ids=["neon", "plain"])
def test_its_own_test_passes_on_a_64_bit_arm(kind, flags, tmp_path):
    """The values are PyTorch's on x86."""
    sources = ["-std=c99", f"-I{kind.folder}", kind.folder / "test_model.c", kind.folder / "model.c"]
    weights = [kind.folder / "model.weights"] * (kind.folder / "model.weights").exists()
    assert emulated(tmp_path / "replayed", *flags, *sources, given=weights).startswith(b"passed: 8 steps")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_model_is_what_the_bundle_computes(make_bundle, name, tmp_path):
    """The command compares both over chained segments, and writes nothing where they differ."""
    need("cc")
    path = make_bundle(FORMS[name], batch_size=2, segment_length=(6, 1), verify=False)
    for length in (6, 1):
        made = package_c(path, tmp_path / f"l{length}", name="model", lengths=(length,), batch_size=2)
        assert "outputs max abs" in made.verified
        assert "txl_step" in (made.folder / "model.c").read_text()


def test_a_hidden_memory_stays_with_the_generator(tmp_path):
    made = package_c(BUNDLES / "hidden", tmp_path / "c", name="model", batch_size=1, unverified=True)
    assert "model_program" in (made.folder / "model.c").read_text()
    assert "txl_step" not in (made.folder / "model.c").read_text()


def test_sizes_are_told_and_are_those_of_one_ring(kind):
    header = (kind.folder / "model.h").read_text()
    sizes = re.findall(r"float (?:keys|values)\[(\d+)\]\[(\d+)\]", header)
    whole = 4 * (sum(int(layers) * int(numbers) for layers, numbers in sizes) + 2 * kind.batch_size)
    file = (kind.folder / "model.weights").exists()
    assert kind.state_bytes == (math.ceil(whole / 8) * 8 + 8 if file else whole)
    if file:
        assert kind.weight_bytes == (kind.folder / "model.weights").stat().st_size
    assert kind.stack_bytes < 64_000
    assert kind.multiply_adds > 1000


FAULTS = {
    "a ring that does not turn": ("% 10;", "% 1;"),
    "rows that are not counted": ("running[row] > 6 - state->fill[row] ? 6 :", "running[row] > 9 ? 6 :"),
    "outputs that are not cleared": ("memset(out + count", "memset(out + 4"),
    "a reset that forgets": ("if (which && !which[row])", "if (which)"),
    "an initial row that is not written": ("= start[head * width + d];", "= 0 * start[head * width + d];"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_the_bundle_is_refused(tmp_path, monkeypatch, fault):
    need("cc")
    (right, wrong), real = FAULTS[fault], package.render

    def render(template, context):
        text = real(template, context)
        assert template != "native.c" or right in text
        return text.replace(right, wrong) if template == "native.c" else text

    monkeypatch.setattr(package, "render", render)
    with pytest.raises(CheckError, match=r"is not the model|ended with"):
        package_c(BUNDLES / "zeros", tmp_path / "out", batch_size=3)
    assert not list(tmp_path.iterdir())


def test_weights_are_laid_out_in_strips():
    """Column c of row k lies in strip c / 64, as `products.h` says."""
    values = np.arange(5 * 70, dtype=np.float32).reshape(5, 70)
    packed = Packed(Shape(layers=1))
    packed.product(0, 0, Matrix(values), None)
    found = packed.layers[0]["products"][0]
    strips = packed.arrays[found["matrix"]]
    assert strips.shape == (2, 16, 64)
    assert strips[1, 3, 2] == values[3, 66]
    assert (found["in"], found["out"], found["columns"]) == (16, 80, 70)
