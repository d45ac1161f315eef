"""Wrong use and bad files: exit code 2, one line that says what was found and what to do, nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frozen import frozen
from resealing import reseal
from support import cli, random_state, save_checkpoint, small_config

CONFIG = small_config()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a good checkpoint `good.pt`."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "good.pt", CONFIG)
    return tmp_path


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    state = random_state(CONFIG)
    return state | {name: change(state[name])}


def without(name: str) -> dict[str, torch.Tensor]:
    return {own: tensor for own, tensor in random_state(CONFIG).items() if own != name}


# ---- checkpoints


@pytest.mark.parametrize(
    ("verb", "named"), [("export", "ckpt/model.ckpt-0"), ("export", "ckpt"), ("inspect", "ckpt/model.ckpt-0.index")]
)
def test_a_tensorflow_checkpoint_is_told_the_way_to_convert_it(here, run, verb, named):
    (here / "ckpt").mkdir()
    for name in ("model.ckpt-0.index", "model.ckpt-0.data-00000-of-00001"):
        (here / "ckpt" / name).write_bytes(bytes(40))
    (here / "ckpt" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')
    error = run(verb, named).error
    assert error.startswith(f"error: {named}: this is a TensorFlow checkpoint, expected PyTorch")
    assert "convert_transfo_xl_original_tf_checkpoint_to_pytorch --tf_checkpoint_path ckpt/model.ckpt-0 " in error


def checkpoint(config: Any = CONFIG, state: Any = None, **more: Any) -> Callable[[Path], object]:
    return lambda path: save_checkpoint(path, config, state, **more)


OUTPUT = "layers.01.attention.output.weight"
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "folder": (Path.mkdir, ("folder", "config.json")),
    "a number": (lambda path: torch.save(5, path), ("int", "expected")),
    "no tensors": (lambda path: torch.save({"step": 5, "loss": 1.0}, path), ("step", "expected a state dict")),
    "nothing": (lambda path: torch.save({}, path), ("nothing", "expected a state dict")),
    "other tensors": (lambda path: torch.save({"fc.weight": torch.ones(2, 2)}, path), ("fc.weight", "--family")),
    "bare state": (lambda path: torch.save(random_state(CONFIG), path), ("--config FILE.json",)),
    "missing tensor": (checkpoint(state=without(OUTPUT)), (OUTPUT, "missing", "n_layer 2")),
    "unexpected tensor": (
        checkpoint(state=random_state(CONFIG) | {"layers.02.feed_forward.inner.bias": torch.zeros(32)}),
        ("layers.02.feed_forward.inner.bias", "not expected"),
    ),
    "wrong shape": (checkpoint(state=changed(OUTPUT, lambda tensor: tensor[:-1])), (OUTPUT, "[15, 16]", "[16, 16]")),
    "integers": (checkpoint(state=changed(OUTPUT, lambda tensor: tensor.long())), (OUTPUT, "int64", "floating point")),
    "complex": (
        checkpoint(state=changed(OUTPUT, lambda tensor: tensor.to(torch.complex64))),
        ("complex tensors are not read here",),
    ),
    "NaN": (checkpoint(state=changed(OUTPUT, lambda tensor: tensor * torch.nan)), (OUTPUT, "256 values", "finite")),
    "half too large": (
        checkpoint(state=changed(OUTPUT, lambda tensor: tensor.double() * 1e300)),
        (OUTPUT, "NaN or infinite"),
    ),
    "no tensor": (checkpoint(state=random_state(CONFIG) | {OUTPUT: 5}), (OUTPUT,)),
    "newer version": (checkpoint(version=2), ("version 2", "expected 1", "upgrade")),
    "config of no mapping": (checkpoint(config=[1, 2], state=random_state(CONFIG)), ("'config' is not a mapping",)),
    "state of no mapping": (checkpoint(state=[1, 2]), ("'state' is not a mapping",)),
    "config name missing": (
        checkpoint(config={k: v for k, v in CONFIG.items() if k != "d_head"}, state=random_state(CONFIG)),
        ("d_head",),
    ),
    "config of the wrong type": (
        checkpoint(config=CONFIG | {"n_head": "two"}, state=random_state(CONFIG)),
        ("n_head", "int", "str"),
    ),
    "config out of range": (
        checkpoint(config=CONFIG | {"n_layer": 0}, state=random_state(CONFIG)),
        ("n_layer", ">= 1"),
    ),
    "absurdly wide": (
        checkpoint(config=CONFIG | {"d_model": 2**31 - 1}, state=random_state(CONFIG)),
        ("embedding.projections.0", "missing", "check the config"),
    ),
    "odd width": (checkpoint(config=CONFIG | {"d_model": 15, "d_embed": 15}), ("d_model is 15", "even")),
    "cutoffs that do not ascend": (
        checkpoint(config=CONFIG | {"cutoffs": (40, 20)}, state=random_state(CONFIG)),
        ("cutoffs [40, 20] do not ascend", "such as [20000, 40000, 200000]"),
    ),
    "a cluster without tokens": (
        checkpoint(config=CONFIG | {"cutoffs": (20, 60)}, state=random_state(CONFIG)),
        ("cutoffs [20, 60] do not ascend", "without these two"),
    ),
    "vocabulary of an unknown kind": (checkpoint(vocabulary={"kind": "runes"}), ("runes", "vocabulary")),
    "vocabulary of another size": (checkpoint(vocabulary={"kind": "bytes"}), ("256", "60")),
    "vocabulary of no JSON": (checkpoint(vocabulary={"kind": torch.ones(2)}), ("vocabulary",)),
}


@pytest.mark.parametrize(("write", "parts"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_used_is_refused(run, here, write, parts):
    write(here / "model.pt")
    before = sorted(here.iterdir())
    error = run("export", "model.pt").error
    assert all(part in error for part in parts), error
    assert len(error) < 600
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(("path", "said"), [("no.pt", "no such file"), ("taken", "config.json"), ("text.txt", "text")])
@pytest.mark.parametrize("verb", ["export", "inspect"])
def test_what_is_neither_bundle_nor_checkpoint_is_refused(run, files, verb, path, said):
    error = run(verb, path).error
    assert path in error
    assert said in error or (verb, path) == ("inspect", "no.pt")


@pytest.mark.parametrize(
    ("name", "options", "family", "said", "parts"),
    [
        ("other tensors", (), "not recognised: ", "family", ("fc.weight", "--family")),
        ("no tensors", (), "not recognised: ", "family", ("expected a state dict",)),
        ("bare state", (), "txl", "needed", ("--config FILE.json", '"n_layer":16')),
        ("config name missing", (), "txl", "needed", ("d_head", '--config FILE.json, which holds e.g. {"d_head":41}')),
        ("missing tensor", (), "txl", "refused", (OUTPUT, "missing")),
        ("good", ("--family", "nvidia"), "", "family", ("is of family txl", "--family")),
        ("good", ("--alias", "a.B=os.system"), "", "refused", ("os.system", "mem_transformer.MemTransformerLM")),
    ],
)
def test_inspect_describes_a_file_it_cannot_export(run, here, name, options, family, said, parts):
    if name != "good":
        CHECKPOINTS[name][0](here / "good.pt")
    result = run("inspect", "good.pt", *options, "--json")
    assert result.code == 0
    document = json.loads(result.stdout)
    assert document.get("family", "").startswith(family)
    assert all(part in document[said] for part in parts), document[said]
    assert document.get("tensors") or name in ("no tensors", "good")


# ---- options of export


ABSURD = 10**12
EXPORTS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    **{
        f"{flag} {value}": ((flag, value), (f"{flag} is {value}, expected a whole number of",))
        for flag, values in {
            "--segment-length": (0, 8193, ABSURD),
            "--memory-length": (-1, 65537),
            "--batch-size": (0, 1025),
            "--clamp-length": (-2, ABSURD),
        }.items()
        for value in values
    },
    "each fine, together too large": (
        ("--segment-length", 8192, "--memory-length", 65536, "--batch-size", 1024),
        ("GB", "--batch-size"),
    ),
    "a length that is no number": (("--segment-length", "long"), ("--segment-length", "integer", "--help")),
    "a window and nothing to see": (("--memory-length", 0, "--same-length"), ("--no-same-length",)),
    "unknown family": (("--family", "gpt"), ("gpt", "kimiyoung")),
    "another family": (("--family", "hf"), ("txl", "hf", "leave it out")),
    "half of a name to keep": (
        ("--precision", "int4", "--keep", "layers.0"),
        ("--keep layers.0 names no matrix", "expected e.g. layers.00"),
    ),
    "unknown initial memory": (("--initial-memory", "ones"), ("--initial-memory", "zeros")),
    "an order of no clusters": (("--cluster-order", "reversed"), ("one cluster", "leave it out")),
    "output is nothing": (("-o", ""), ("expected", "-o")),
    "config missing": (("--config", "no.json"), ("no.json", "No such file", "--config")),
    "config is no JSON": (("--config", "broken.json"), ("broken.json", "expected one JSON object")),
    "config of the wrong type": (("--config", "type.json"), ("n_head", "int", "check the config")),
    "config of another model": (("--config", "layers.json"), ("layers.02.", "missing", "check the config")),
    "text without a vocabulary": (("--text", "text.txt"), ("text.txt", "no vocabulary", "--tokens")),
    "text and tokens": (("--text", "text.txt", "--tokens", "ids.npy"), ("both", "leave --text or --tokens out")),
    "tokens missing": (("--tokens", "no.npy"), ("no.npy", ".npy file of token ids")),
    "tokens are float": (("--tokens", "float.npy"), ("float.npy", "float64", "expected at least 2 whole numbers")),
    "tokens are 2-D": (("--tokens", "square.npy"), ("square.npy", "[5, 5]", "one row")),
    "tokens are one": (("--tokens", "one.npy"), ("one.npy", "at least 2")),
    "tokens negative": (("--tokens", "negative.npy"), ("negative.npy", "ids -1 … 9", "expected 0 … 59")),
    "several arrays": (("--tokens", "several.npz"), ("several.npz", "several arrays")),
    "tokens too large": (("--tokens", "large.npy"), ("large.npy", "ids 0 … 60", "expected 0 … 59")),
}


@pytest.fixture
def files(here: Path) -> Path:
    """Files of many kinds that options can name."""
    (here / "taken").mkdir()
    (here / "taken" / "thesis.tex").write_text("precious")
    (here / "text.txt").write_text("real text")
    (here / "short.txt").write_text("a")
    (here / "broken.json").write_text('{"n_layer": 2,')
    (here / "list.json").write_text("[1, 2]")
    (here / "type.json").write_text('{"n_head": "two"}')
    (here / "layers.json").write_text('{"n_layer": 3}')
    arrays = {
        "ids": np.arange(10),
        "float": np.arange(10.0),
        "square": np.zeros((5, 5), int),
        "one": np.zeros(1, int),
        "scalar": np.array(5),
        "large": np.array([0, 60]),
        "negative": np.arange(-1, 10),
    }
    for name, array in arrays.items():
        np.save(here / f"{name}.npy", array)
    np.save(here / "pickled.npy", np.array([{"a": 1}], object), allow_pickle=True)
    np.savez(here / "several.npz", a=np.arange(3), b=np.arange(3))
    return here


@pytest.mark.parametrize(("options", "parts"), EXPORTS.values(), ids=EXPORTS)
def test_an_option_of_export_that_makes_no_sense_is_refused(run, files, options, parts):
    before = sorted(files.rglob("*"))
    error = run("export", "good.pt", *options).error
    assert all(part in error for part in parts), error
    assert sorted(files.rglob("*")) == before


def test_config_keys_without_a_meaning_are_named_and_ignored(run, here):
    (here / "config.json").write_text(json.dumps(CONFIG | {"dropout": 0.1, "optim": "adam"}))
    torch.save(random_state(CONFIG), here / "bare.pt")
    (here / "text.txt").write_text("no vocabulary reads it")
    result = run("export", "bare.pt", "--config", "config.json", "--text", "text.txt")
    assert "no vocabulary" in result.error
    assert "note: config keys without a meaning here, ignored: dropout, optim" in result.lines


# ---- bundles


def altered(bundle: Path) -> None:
    path = bundle / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


VERBS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "verify": (),
    "selftest": (),
    "generate": ("--prompt-tokens", "1,2"),
    "score": ("ids.npy",),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_damaged_bundle_is_refused_by_every_verb(run, here, verb):
    altered(shutil.copytree(NO_TEXT, here / "copy.txl"))
    np.save(here / "ids.npy", np.arange(10))
    error = run(verb, "copy.txl", *VERBS[verb]).error
    assert all(part in error for part in ("weights.safetensors", "SHA-256", "copy the bundle again")), error


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        # Verification opens every graph, the others those of the ring and the softmax.
        *(("verify", name) for name in ("hidden-ring.onnx", "head.onnx", "logprobs-4.onnx", "logprobs-1.onnx")),
        *((verb, "hidden-ring.onnx") for verb in ("selftest", "generate", "score")),
    ],
)
def test_a_graph_that_is_none_is_refused_when_it_is_opened(run, here, verb, name):
    copy = shutil.copytree(NO_TEXT, here / "copy.txl")
    (copy / name).write_bytes(b"not a graph")
    reseal(copy)
    np.save(here / "ids.npy", np.arange(10))
    options = ("--prompt-tokens", "1,2,3") if verb == "generate" else VERBS[verb]
    error = run(verb, "copy.txl", *options).error
    assert name in error
    assert "in the model, expected " in error


@pytest.mark.parametrize("verb", list(VERBS)[1:])
@pytest.mark.parametrize(("path", "found"), [("nothing", "nothing"), ("good.pt", "a file"), ("empty", "no manifest")])
def test_what_is_no_bundle_is_refused(run, here, verb, path, found):
    (here / "empty").mkdir()
    np.save(here / "ids.npy", np.arange(10))
    error = run(verb, path, *VERBS[verb]).error
    assert all(part in error for part in (path, found, "expected a bundle", "txl-deploy export")), error


# ---- arguments of the other verbs


NO_TEXT, TEXT = frozen("0.8/clusters"), frozen("clusters")
"""Two Transformer-XLs, one of 41 tokens that reads no text."""
USES: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
    (("inspect", "  "), ("the path is empty", "name one")),
    (("inspect", "."), ("manifest.json", "config.json", "name one")),
    (("inspect", "good.pt", "--family", "gpt"), ("--family", "kimiyoung")),
    (("inspect", "good.pt", "--config", "no.json"), ("no.json", "--config")),
    (("inspect", "good.pt", "--config", "list.json"), ("list.json: holds a list", "--config")),
    (("inspect", "good.pt", "--alias", "a.B"), ("--alias is 'a.B'", "theirs=original")),
    (("inspect", TEXT, "--family", "txl"), ("is a bundle",)),
    (("inspect", TEXT, "--config", "a.json"), ("is a bundle",)),
    *(
        ((verb, NO_TEXT, *more, "--backend", "rtx"), ("backend rtx", "cannot run here", "no engines"))
        for verb, more in VERBS.items()
        if verb != "inspect"
    ),
    (("score", NO_TEXT, "ids.npy", "--backend", "abacus"), ("'abacus'", "expected one of auto, cpu")),
    (("score", NO_TEXT, "ids.npy", "--threads", 0), ("threads is 0", "a whole number of 1 … 1024")),
    (("score", NO_TEXT, "ids.npy", "--threads", "many"), ("--threads", "integer")),
    (("verify", NO_TEXT, "--segments", 0), ("--segments is 0", "1 … 1000000")),
    (("verify", NO_TEXT, "--text", "text.txt"), ("no vocabulary", "--tokens")),
    (("verify", NO_TEXT, "--checkpoint", "nothing.pt"), ("nothing.pt", "no such file")),
    (("generate", NO_TEXT), ("twice or not at all", "--prompt or --prompt-tokens")),
    (("generate", NO_TEXT, "--prompt", "a"), ("no vocabulary", "--prompt-tokens 1,2,3")),
    (("generate", TEXT, "--prompt", ""), ("--prompt is empty",)),
    (("generate", NO_TEXT, "--prompt-tokens", ""), ("--prompt-tokens is ''", "such as 1,2,3")),
    (("generate", NO_TEXT, "--prompt-tokens", "1,two"), ("'1,two'", "such as 1,2,3")),
    (("generate", NO_TEXT, "--prompt-tokens", "1,99999999999"), ("99999999999",)),
    (("generate", NO_TEXT, "--prompt-tokens", "1,60"), ("id 60 at [0, 1]", "expected 0 … 40")),
    (("generate", NO_TEXT, "--prompt-tokens", "1", "--max-new-tokens", -1), ("max_new_tokens is -1", "at least 0")),
    (("generate", NO_TEXT, "--prompt-tokens", "1", "--temperature", "hot"), ("--temperature", "number")),
    (("generate", NO_TEXT, "--prompt-tokens", "1", "--stop-tokens", "end"), ("--stop-tokens is 'end'",)),
    (("generate", NO_TEXT, "--prompt-tokens", "1", "--forbid", "end"), ("--forbid is 'end'",)),
    (("generate", NO_TEXT, "--prompt-tokens", "1", "--allow", "99999"), ("allow is [99999], expected a list of ids",)),
    (("score", NO_TEXT, "nothing"), ("nothing", "No such file", "expected a file to score")),
    (("score", NO_TEXT, "taken"), ("taken/thesis.tex", "no vocabulary")),
    (("score", NO_TEXT, "text.txt"), ("text.txt", "no vocabulary", ".npy")),
    (("score", NO_TEXT, "float.npy"), ("float64", "whole numbers")),
    (("score", NO_TEXT, "square.npy"), ("square.npy", "shape [T]")),
    (("score", NO_TEXT, "scalar.npy"), ("scalar.npy", "shape [T]")),
    (("score", NO_TEXT, "one.npy"), ("holds 1 tokens", "at least 2")),
    (("score", NO_TEXT, "large.npy"), ("id 60", "expected 0 … 40")),
    (("score", NO_TEXT, "pickled.npy"), ("pickled.npy", "expected an .npy file of token ids")),
    (("score", TEXT, "short.txt"), ("holds 1 tokens, expected at least 2",)),
]


@pytest.mark.parametrize(("arguments", "parts"), USES, ids=str)
def test_a_verb_refuses_what_it_cannot_use(run, files, arguments, parts):
    error = run(*arguments).error
    assert all(part in error for part in parts), error


# ---- as a process


def test_a_refusal_is_one_line_and_exit_code_2_of_the_process_too(files):
    before = sorted(files.rglob("*"))
    for arguments in (("export", "good.pt", "--batch-size", 0), ("score", "taken", "ids.npy")):
        done = cli(*arguments, cwd=files)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        *before_it, error = done.stderr.splitlines()
        assert error.startswith("error: ")
        assert all(line.endswith(" s") for line in before_it)
    assert sorted(files.rglob("*")) == before
