"""Packages with several segment lengths: blocks of any size are cut into them, and give what one segment would."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import txl_runtime
from plain_c import BUNDLES, build, need
from support import call_main
from txl_runtime.errors import UsageError

from txl_deploy.plain_c import generating
from txl_deploy.plain_c.package import package_c
from txl_deploy.plain_c.rendering import FLAGS, keys_of

PROGRAM = """
#include "model.h"
#include <stdio.h>
#include <stdlib.h>
static model_state state;
int main(int count, char **words)
{
    static float obs[4096 * 6], action[4096 * 3], value[4096];
    model_init(&state);
    for (int i = 1; i < count; i++) {
        const size_t n = strtoul(words[i], NULL, 10);
        if (fread(obs, 6 * sizeof *obs, n, stdin) != n) return 1;
        model_feed(&state, obs, n, action, value);
        fwrite(action, 3 * sizeof *action, n, stdout);
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    need("cc")
    return package_c(BUNDLES / "policy-1", tmp_path_factory.mktemp("blocks") / "c", name="model", lengths=(1, 4))


def test_blocks_of_any_size_give_what_the_bundle_gives(made, tmp_path):
    (tmp_path / "main.c").write_text(PROGRAM)
    strict = f"{FLAGS} -Wall -Wextra -Werror"
    program = build(made.folder, tmp_path / "main", tmp_path / "main.c", made.folder / "model.c", flags=strict)
    draws = np.random.default_rng(0)
    blocks = [0, 1, 4, 3, 11, *draws.integers(0, 40, 60).tolist()]
    obs = draws.standard_normal((1, sum(blocks), 6)).astype(np.float32)
    command = [str(program), *map(str, blocks)]
    done = subprocess.run(command, input=obs.tobytes(), capture_output=True, check=True)
    wanted = txl_runtime.load(BUNDLES / "policy-1", "cpu", threads=1).stream().feed({"obs": obs})["action"]
    found = np.frombuffer(done.stdout, np.float32).reshape(wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_a_package_tells_what_a_block_of_each_length_costs(made, tmp_path, monkeypatch, capfd):
    header = (made.folder / "model.h").read_text()
    assert list(made.blocks) == [4, 1]
    assert made.blocks[4] == 4 * made.blocks[1] == made.multiply_adds
    assert f"#define MODEL_MULTIPLY_ADDS_1 {made.blocks[1]} " in header
    assert made.latency == 0
    words = ["package", BUNDLES / "policy-1", "--target", "c", "-o", tmp_path / "out", "--unverified"]
    assert "latency 3 positions" in call_main(words, monkeypatch, capfd)[1]


def test_shorter_programs_share_the_weights_and_no_name(made):
    """All weights lie in the file once, and each program has functions of its own."""
    source = (made.folder / "model.c").read_text()
    one = package_c(BUNDLES / "policy-1", made.folder.with_name("one"), name="model", lengths=(4,), unverified=True)
    assert made.weight_bytes == one.weight_bytes
    defined = [line for line in source.splitlines() if line.startswith(("EMX_NODE_FN void", "static void model_"))]
    assert len(set(defined)) == len(defined)


def test_a_program_that_is_wrong_in_its_rests_alone_is_found(tmp_path, monkeypatch):
    """The verification runs blocks that are cut: here the program of one position adds instead of multiplying."""
    need("cc")
    right = generating.apart

    def wrong(source, length):
        return right(source, length).replace("acc += input0[", "acc -= input0[")

    monkeypatch.setattr("txl_deploy.plain_c.rendering.apart", wrong)
    with pytest.raises(Exception, match="the C of this model is not the model"):
        package_c(BUNDLES / "policy-1", tmp_path / "c", name="model", lengths=(4, 1))


@pytest.mark.parametrize(
    ("bundle", "options", "said"),
    [
        ("policy-1", {"lengths": (4, 2)}, "expected 1 among them"),
        ("policy-16", {"lengths": (4, 1), "batch_size": 2}, "several lengths are for one sequence"),
        ("lookahead", {"lengths": (4, 1), "batch_size": 1}, "frames is .*without look-ahead"),
        ("table", {"lengths": (4, 1)}, "of a model with exact lengths"),
        ("policy-1", {"lengths": (0,)}, "segment length is 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(bundle, options, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        package_c(BUNDLES / bundle, tmp_path / "c", name="model", unverified=True, **options)
    assert not list(tmp_path.iterdir())


def test_programs_share_arrays_and_one_program_has_its_own_twice() -> None:
    """Two biases of zeros in one program are two parameters, which may not point to the same place."""
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    first, second = keys_of([zeros, ones, zeros.copy()]), keys_of([zeros.copy()])
    assert len(set(first)) == 3
    assert second == first[:1]
