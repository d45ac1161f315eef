"""Wrong use and bad files: exit code 2, one line that says what was found and what to do, nothing left behind."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import call_main, cli, random_state, save_checkpoint, small_config
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.reading import MANIFEST

CONFIG = small_config()


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    lines: list[str]

    @property
    def error(self) -> str:
        """The one line of a refusal; only notes and finished stages may stand before it."""
        assert self.code == 2
        assert self.stdout == ""
        *before, error = self.lines
        assert all(line.startswith("note: ") or line.endswith(" s") for line in before), before
        assert error.startswith("error: ")
        return error


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """A command in this process: what `txl-deploy` itself calls. An error nobody foresaw would come out of it."""

    def call(*arguments: object) -> Result:
        code, stdout, stderr = call_main(arguments, monkeypatch, capfd)
        return Result(code, stdout, stderr.splitlines())

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a good checkpoint `good.pt`."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "good.pt", CONFIG)
    return tmp_path


@pytest.fixture
def bundle(make_bundle: Callable[..., Path]) -> Path:
    return make_bundle()


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    state = random_state(CONFIG)
    return state | {name: change(state[name])}


def without(name: str) -> dict[str, torch.Tensor]:
    return {own: tensor for own, tensor in random_state(CONFIG).items() if own != name}


# ---- checkpoints


@pytest.mark.parametrize("named", ["ckpt/model.ckpt-0", "ckpt", "ckpt/model.ckpt-0.index"])
@pytest.mark.parametrize("verb", ["export", "inspect"])
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


def truncated(path: Path) -> None:
    save_checkpoint(path, CONFIG)
    os.truncate(path, path.stat().st_size * 2 // 3)


def garbled(path: Path) -> None:
    save_checkpoint(path, CONFIG)
    data = bytearray(path.read_bytes())
    data[:64] = bytes(64)
    path.write_bytes(data)


OUTPUT = "layers.01.attention.output.weight"
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (lambda path: None, ("model.pt", "no such file", "check the path")),
    "empty": (lambda path: path.touch(), ("is empty",)),
    "folder": (Path.mkdir, ("folder", "config.json")),
    "text": (lambda path: path.write_text("import torch\n"), ("looks like text", "expected a checkpoint")),
    "zeros": (lambda path: path.write_bytes(bytes(5000)), ("expected a file by torch.save or safetensors",)),
    "truncated": (truncated, ("model.pt",)),
    "garbled": (garbled, ("model.pt",)),
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
        ("ComplexFloatStorage",),
    ),
    "NaN": (checkpoint(state=changed(OUTPUT, lambda tensor: tensor * torch.nan)), (OUTPUT, "256 values", "finite")),
    "infinity": (checkpoint(state=changed(OUTPUT, lambda tensor: tensor.clamp(max=0) / 0)), (OUTPUT, "finite")),
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
    "more layers than the state has": (
        checkpoint(config=CONFIG | {"n_layer": 3}, state=random_state(CONFIG)),
        ("layers.02.", "missing", "n_layer 3"),
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
    "cutoffs beyond the vocabulary": (
        checkpoint(config=CONFIG | {"cutoffs": (20, 90)}, state=random_state(CONFIG)),
        ("cutoffs [20, 90] do not ascend between 0 and the vocabulary's 60", "check the config"),
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


@pytest.mark.parametrize("name", ["missing", "empty", "folder", "text", "zeros", "truncated", "garbled"])
def test_inspect_refuses_what_is_neither_bundle_nor_checkpoint(run, here, name):
    write, parts = CHECKPOINTS[name]
    write(here / "model.pt")
    error = run("inspect", "model.pt").error
    assert "model.pt" in error
    assert name == "missing" or all(part in error for part in parts)


@pytest.mark.parametrize(
    ("name", "family", "said", "parts"),
    [
        ("other tensors", "not recognised: ", "family", ("fc.weight", "--family")),
        ("no tensors", "not recognised: ", "family", ("expected a state dict",)),
        ("bare state", "txl", "needed", ("--config FILE.json", '"n_layer":16')),
        ("config name missing", "txl", "needed", ("d_head", '--config FILE.json, which holds e.g. {"d_head":41}')),
        ("missing tensor", "txl", "refused", (OUTPUT, "missing")),
    ],
)
def test_inspect_describes_a_file_it_cannot_export(run, here, name, family, said, parts):
    CHECKPOINTS[name][0](here / "model.pt")
    result = run("inspect", "model.pt", "--json")
    assert result.code == 0
    document = json.loads(result.stdout)
    assert document["family"].startswith(family)
    assert all(part in document[said] for part in parts), document[said]
    assert [entry["name"] for entry in document["tensors"]] or name == "no tensors"


def test_inspect_takes_the_options_that_make_a_checkpoint_loadable(run, here):
    torch.save(random_state(CONFIG), here / "bare.pt")
    (here / "config.json").write_text(json.dumps(CONFIG))
    document = json.loads(run("inspect", "bare.pt", "--config", "config.json", "--family", "txl", "--json").stdout)
    assert document["family"] == "txl"
    assert document["recognised"] == "txl: tensors named embedding.tables.0"
    assert document["config"]["n_layer"] == CONFIG["n_layer"]
    assert "needed" not in document
    shown = run("inspect", "bare.pt")
    assert (shown.code, shown.lines) == (0, [])
    assert "needed" in shown.stdout
    assert "not recognised" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("",), ("the path is empty", "name one")),
        (("  ",), ("the path is empty",)),
        ((".",), ("manifest.json", "config.json", "name one")),
        (("good.pt", "--family", "gpt"), ("--family", "kimiyoung")),
        (("good.pt", "--config", "no.json"), ("no.json", "--config")),
        (("good.pt", "--config", "list.json"), ("list.json: holds a list", "--config")),
        (("good.pt", "--alias", "a.B"), ("--alias is 'a.B'", "theirs=original")),
    ],
    ids=str,
)
def test_inspect_refuses_options_that_make_no_sense(run, files, arguments, parts):
    error = run("inspect", *arguments).error
    assert all(part in error for part in parts), error


@pytest.mark.parametrize(
    ("options", "said", "parts"),
    [
        (("--family", "nvidia"), "family", ("is of family txl", "--family")),
        (("--alias", "a.B=os.system"), "refused", ("os.system", "mem_transformer.MemTransformerLM")),
    ],
    ids=str,
)
def test_inspect_describes_a_file_that_options_do_not_fit(run, here, options, said, parts):
    result = run("inspect", "good.pt", *options, "--json")
    assert result.code == 0
    found = json.loads(result.stdout)[said]
    assert all(part in found for part in parts), found


def test_options_for_checkpoints_are_refused_for_bundles(run, bundle):
    for options in (("--family", "txl"), ("--config", "a.json"), ("--alias", "a.B=c.D")):
        assert "is a bundle" in run("inspect", bundle, *options).error


# ---- options of export


ABSURD = 10**12
EXPORTS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    **{
        f"{flag} {value}": ((flag, value), (f"{flag} is {value}, expected a whole number of",))
        for flag, values in {
            "--segment-length": (0, -1, 8193, ABSURD),
            "--memory-length": (-1, 65537, ABSURD),
            "--batch-size": (0, -3, 1025, ABSURD),
            "--clamp-length": (-2, ABSURD),
        }.items()
        for value in values
    },
    "one bad length of several": (("--segment-length", 4, "--segment-length", 0), ("--segment-length is 0",)),
    "each fine, together too large": (
        ("--segment-length", 8192, "--memory-length", 65536, "--batch-size", 1024),
        ("GB", "--batch-size"),
    ),
    "a length that is no number": (("--segment-length", "long"), ("--segment-length", "integer", "--help")),
    "a window and nothing to see": (("--memory-length", 0, "--same-length"), ("--no-same-length",)),
    "unknown family": (("--family", "gpt"), ("gpt", "kimiyoung")),
    "another family": (("--family", "hf"), ("txl", "hf", "leave it out")),
    "unknown precision": (("--precision", "fp7"), ("fp7", "fp32")),
    "a matrix to keep that is not there": (
        ("--precision", "int8", "--keep", "layers.09"),
        ("--keep layers.09 names no matrix", "expected e.g. layers.00"),
    ),
    "half of a name to keep": (("--precision", "int4", "--keep", "layers.0"), ("--keep layers.0 names no matrix",)),
    "unknown memory": (("--memory", "paper"), ("paper", "hidden")),
    "unknown initial memory": (("--initial-memory", "ones"), ("--initial-memory", "zeros")),
    "unknown cluster order": (("--cluster-order", "random"), ("--cluster-order", "ascending")),
    "an order of no clusters": (("--cluster-order", "reversed"), ("one cluster", "leave it out")),
    "an embedding scale of 0": (("--embedding-scale", 0), ("--embedding-scale is 0.0", "above 0")),
    "an embedding scale of none": (("--embedding-scale", "nan"), ("--embedding-scale is nan", "above 0")),
    "an endless embedding scale": (("--embedding-scale", "inf"), ("--embedding-scale is inf", "above 0")),
    "unknown option": (("--speed", "high"), ("--speed", "--help")),
    "two arguments": (("other.pt",), ("other.pt", "--help")),
    "parent is missing": (("-o", "nowhere/model.txl"), ("nowhere: found nothing", "create it or give another -o")),
    "parent is a file": (("-o", "good.pt/model.txl"), ("good.pt: found a file", "another -o")),
    "output exists": (("-o", "taken"), ("taken: exists already", "--force")),
    "output is no bundle": (("-o", "taken", "--force"), ("taken: is not a bundle", "remove it yourself")),
    "output is a file": (("-o", "good.pt", "--force"), ("good.pt: is not a bundle",)),
    "output is nothing": (("-o", ""), ("expected", "-o")),
    "config missing": (("--config", "no.json"), ("no.json", "No such file", "--config")),
    "config is a folder": (("--config", "taken"), ("taken", "--config")),
    "config is no JSON": (("--config", "broken.json"), ("broken.json", "expected one JSON object")),
    "config is no object": (("--config", "list.json"), ("list.json: holds a list", "expected one JSON object")),
    "config is binary": (("--config", "binary.json"), ("binary.json", "expected one JSON object")),
    "config is nested without end": (("--config", "deep.json"), ("deep.json", "expected one JSON object")),
    "config of the wrong type": (("--config", "type.json"), ("n_head", "int", "check the config")),
    "config of another model": (("--config", "layers.json"), ("layers.02.", "missing", "check the config")),
    "text without a vocabulary": (("--text", "text.txt"), ("text.txt", "no vocabulary", "--tokens")),
    "text and tokens": (("--text", "text.txt", "--tokens", "ids.npy"), ("both", "leave --text or --tokens out")),
    "tokens missing": (("--tokens", "no.npy"), ("no.npy", ".npy file of token ids")),
    "tokens of text": (("--tokens", "text.txt"), ("text.txt", "expected an .npy file of token ids")),
    "tokens in a folder": (("--tokens", "taken"), ("taken", "expected an .npy file of token ids")),
    "tokens are float": (("--tokens", "float.npy"), ("float.npy", "float64", "expected at least 2 whole numbers")),
    "tokens are 2-D": (("--tokens", "square.npy"), ("square.npy", "[5, 5]", "one row")),
    "tokens are one": (("--tokens", "one.npy"), ("one.npy", "at least 2")),
    "tokens are none": (("--tokens", "none.npy"), ("none.npy", "at least 2")),
    "tokens are a number": (("--tokens", "scalar.npy"), ("scalar.npy", "at least 2")),
    "tokens too large": (("--tokens", "large.npy"), ("large.npy", "ids 0 … 60", "expected 0 … 59")),
    "tokens negative": (("--tokens", "negative.npy"), ("negative.npy", "ids -1 … 9", "expected 0 … 59")),
    "tokens pickled": (("--tokens", "pickled.npy"), ("pickled.npy", "expected an .npy file of token ids")),
    "several arrays": (("--tokens", "several.npz"), ("several.npz", "several arrays")),
    "a zip that is none": (("--tokens", "damaged.npz"), ("damaged.npz", "expected an .npy file of token ids")),
    "tokens cut off": (("--tokens", "cut.npy"), ("cut.npy", "expected an .npy file of token ids")),
}


@pytest.fixture
def files(here: Path) -> Path:
    """Files of many kinds that options can name."""
    (here / "taken").mkdir()
    (here / "taken" / "thesis.tex").write_text("precious")
    (here / "text.txt").write_text("real text")
    (here / "broken.json").write_text('{"n_layer": 2,')
    (here / "list.json").write_text("[1, 2]")
    (here / "binary.json").write_bytes(b"\xff\xfe\x00")
    (here / "deep.json").write_text("[" * 100_000)
    (here / "type.json").write_text('{"n_head": "two"}')
    (here / "layers.json").write_text('{"n_layer": 3}')
    arrays = {
        "ids": np.arange(10),
        "float": np.arange(10.0),
        "square": np.zeros((5, 5), int),
        "one": np.zeros(1, int),
        "none": np.zeros(0, int),
        "scalar": np.array(5),
        "large": np.array([0, 60]),
        "negative": np.arange(-1, 10),
    }
    for name, array in arrays.items():
        np.save(here / f"{name}.npy", array)
    np.save(here / "pickled.npy", np.array([{"a": 1}], object), allow_pickle=True)
    np.savez(here / "several.npz", a=np.arange(3), b=np.arange(3))
    data = (here / "several.npz").read_bytes()
    (here / "damaged.npz").write_bytes(data[: len(data) // 2])
    (here / "cut.npy").write_bytes((here / "ids.npy").read_bytes()[:140])
    return here


@pytest.mark.parametrize(("options", "parts"), EXPORTS.values(), ids=EXPORTS)
def test_an_option_of_export_that_makes_no_sense_is_refused(run, files, options, parts):
    before = sorted(files.rglob("*"))
    error = run("export", "good.pt", *options).error
    assert all(part in error for part in parts), error
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize("path", [".", "..", "/", ""])
def test_an_export_of_no_file_at_all_is_refused(run, here, path):
    before = sorted(here.parent.iterdir())
    assert "expected" in run("export", path).error
    assert sorted(here.parent.iterdir()) == before


def test_config_keys_without_a_meaning_are_named_and_ignored(run, here):
    (here / "config.json").write_text(json.dumps(CONFIG | {"dropout": 0.1, "optim": "adam"}))
    torch.save(random_state(CONFIG), here / "bare.pt")
    result = run("export", "bare.pt", "--config", "config.json", "--segment-length", 1, "--no-verify", "--json")
    assert result.code == 0
    assert "note: config keys without a meaning here, ignored: dropout, optim" in result.lines
    assert (here / "bare.txl" / MANIFEST).is_file()


# ---- bundles


def altered(bundle: Path) -> None:
    path = bundle / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def edited(**fields: object) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        manifest = json.loads((bundle / MANIFEST).read_bytes())
        (bundle / MANIFEST).write_text(json.dumps(manifest | fields))

    return edit


def wrong_graph(bundle: Path, name: str) -> None:
    """A graph that is none, with the right hash."""
    path, manifest = bundle / name, json.loads((bundle / MANIFEST).read_bytes())
    path.write_bytes(b"not a graph")
    manifest["files"][path.name] = {"size": 11, "sha256": file_sha256(path)}
    (bundle / MANIFEST).write_text(json.dumps(manifest))


BUNDLES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "weights altered": (altered, ("weights.safetensors", "SHA-256", "copy the bundle again")),
    "graph missing": (lambda path: (path / "logprobs-1.onnx").unlink(), ("logprobs-1.onnx: missing",)),
    "graph of the ring missing": (
        lambda path: (path / "hidden-ring.onnx").unlink(),
        ("hidden-ring.onnx: missing", "copy the bundle again"),
    ),
    "graph cut off": (lambda path: os.truncate(path / "logprobs-1.onnx", 100), ("logprobs-1.onnx: 100 bytes",)),
    "manifest missing": (lambda path: (path / MANIFEST).unlink(), ("manifest.json",)),
    "manifest cut off": (lambda path: os.truncate(path / MANIFEST, 50), ("manifest.json", "export the model again")),
    "newer format": (edited(format_version="3.0"), ("3.0", "reads up to 2.x", "upgrade")),
    "another format": (edited(format="zip"), ("'zip'", "expected 'txl-deploy.bundle'")),
    "other memory length": (edited(counters={"fill": {"start": 0, "most": 8}}), ("state table", "8 rows")),
    "a path that leaves": (edited(weights="../weights"), ("../weights",)),
}
VERBS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "verify": (),
    "selftest": (),
    "generate": ("--prompt-tokens", "1,2"),
    "score": ("ids.npy",),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("damage", "parts"), BUNDLES.values(), ids=BUNDLES)
def test_a_damaged_bundle_is_refused_by_every_verb(run, here, bundle, verb, damage, parts):
    copy = shutil.copytree(bundle, here / "copy.txl")
    damage(copy)
    np.save(here / "ids.npy", np.arange(10))
    error = run(verb, "copy.txl", *VERBS[verb]).error
    if verb == "inspect" and not (copy / MANIFEST).exists():
        assert "copy.txl" in error
    else:
        assert all(part in error for part in parts), error


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        # Verification opens every graph, the others those of the ring and the softmax.
        *((verb, name) for verb in VERBS if verb != "inspect" for name in ("hidden-ring.onnx", "head.onnx")),
        ("verify", "logprobs-4.onnx"),
        ("verify", "logprobs-1.onnx"),
    ],
)
def test_a_graph_that_is_none_is_refused_when_it_is_opened(run, here, bundle, verb, name):
    copy = shutil.copytree(bundle, here / "copy.txl")
    wrong_graph(copy, name)
    np.save(here / "ids.npy", np.arange(10))
    options = ("--prompt-tokens", "1,2,3") if verb == "generate" else VERBS[verb]
    error = run(verb, "copy.txl", *options).error
    assert name in error
    assert "in the model, expected " in error


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "inspect"])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--backend", "abacus"), ("'abacus'", "expected one of auto, cpu")),
        (("--backend", "rtx"), ("backend rtx", "cannot run here", "no engines", "--backend cpu")),
        (("--threads", 0), ("threads is 0", "a whole number of 1 … 1024")),
        (("--threads", "many"), ("--threads", "integer")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) and value[0] == "--backend" else None,
)
def test_an_engine_that_cannot_be_had_is_refused(run, here, bundle, verb, options, parts):
    np.save(here / "ids.npy", np.arange(10))
    error = run(verb, bundle, *VERBS[verb], *options).error
    assert all(part in error for part in parts), error


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("path", "found"), [("nothing", "nothing"), ("good.pt", "a file"), ("empty", "no manifest")])
def test_what_is_no_bundle_is_refused(run, here, verb, path, found):
    (here / "empty").mkdir()
    np.save(here / "ids.npy", np.arange(10))
    if verb == "inspect":
        if path != "good.pt":
            assert path in run(verb, path).error
        return
    error = run(verb, path, *VERBS[verb]).error
    assert all(part in error for part in (path, found, "expected a bundle", "txl-deploy export")), error


# ---- verify, generate and score


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--segments", 0), ("--segments is 0", "1 … 1000000")),
        (("--segments", -5), ("--segments is -5",)),
        (("--text", "text.txt"), ("no vocabulary", "--tokens")),
        (("--tokens", "large.npy"), ("ids 0 … 60",)),
        (("--tokens", "pickled.npy"), ("expected an .npy file of token ids",)),
        (("--checkpoint", "nothing.pt"), ("nothing.pt", "no such file")),
        (("--checkpoint", "text.txt"), ("text.txt", "looks like text")),
    ],
    ids=str,
)
def test_verify_refuses_what_it_cannot_use(run, files, bundle, options, parts):
    error = run("verify", bundle, *options).error
    assert all(part in error for part in parts), error


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ((), ("twice or not at all", "--prompt or --prompt-tokens")),
        (("--prompt", "a", "--prompt-tokens", "1"), ("twice or not at all",)),
        (("--prompt", "a"), ("no vocabulary", "--prompt-tokens 1,2,3")),
        (("--prompt-tokens", ""), ("--prompt-tokens is ''", "such as 1,2,3")),
        (("--prompt-tokens", "1,two"), ("'1,two'", "such as 1,2,3")),
        (("--prompt-tokens", "1,99999999999"), ("99999999999",)),
        (("--prompt-tokens", "1,60"), ("id 60 at [0, 1]", "expected 0 … 59")),
        (("--prompt-tokens", "-1"), ("id -1", "expected 0 … 59")),
        (("--prompt-tokens", "1", "--max-new-tokens", -1), ("max_new_tokens is -1", "at least 0")),
        (("--prompt-tokens", "1", "--temperature", -1), ("temperature is -1", "0 is greedy")),
        (("--prompt-tokens", "1", "--temperature", "nan"), ("temperature is nan",)),
        (("--prompt-tokens", "1", "--temperature", "hot"), ("--temperature", "number")),
        (("--prompt-tokens", "1", "--top-k", 0), ("top_k is 0", "at least 1")),
        (("--prompt-tokens", "1", "--top-p", 1.5), ("top_p is 1.5", "at most 1")),
        (("--prompt-tokens", "1", "--top-p", "nan"), ("top_p is nan",)),
        (("--prompt-tokens", "1", "--seed", -1), ("seed is -1", "at least 0")),
        (("--prompt-tokens", "1", "--stop-tokens", "end"), ("--stop-tokens is 'end'",)),
    ],
    ids=str,
)
def test_generate_refuses_what_it_cannot_use(run, bundle, options, parts):
    error = run("generate", bundle, *options).error
    assert all(part in error for part in parts), error


def test_an_empty_prompt_is_refused(run, make_bundle):
    bundle = make_bundle(config={"vocab_size": 256}, vocabulary=True)
    assert "--prompt is empty" in run("generate", bundle, "--prompt", "").error


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("nothing", ("nothing", "No such file", "expected a file to score")),
        ("taken", ("taken/thesis.tex", "no vocabulary")),
        ("text.txt", ("text.txt", "no vocabulary", ".npy")),
        ("float.npy", ("float64", "whole numbers")),
        ("square.npy", ("square.npy", "shape [T]")),
        ("scalar.npy", ("scalar.npy", "shape [T]")),
        ("none.npy", ("holds 0 tokens", "at least 2")),
        ("one.npy", ("holds 1 tokens", "at least 2")),
        ("large.npy", ("id 60", "expected 0 … 59")),
        ("negative.npy", ("id -1", "expected 0 … 59")),
        ("pickled.npy", ("pickled.npy", "expected an .npy file of token ids")),
        ("several.npy", ("several.npy", "shape [T]")),
        ("damaged.npy", ("damaged.npy", "expected an .npy file of token ids")),
        ("cut.npy", ("cut.npy", "expected an .npy file of token ids")),
        ("text.npy", ("text.npy", "expected an .npy file of token ids")),
        ("empty.npy", ("empty.npy", "expected an .npy file of token ids")),
    ],
)
def test_score_refuses_what_it_cannot_read(run, files, bundle, file, parts):
    for name in ("several", "damaged"):
        shutil.copy(files / f"{name}.npz", files / f"{name}.npy")
    shutil.copy(files / "text.txt", files / "text.npy")
    (files / "empty.npy").touch()
    error = run("score", bundle, file).error
    assert all(part in error for part in parts), error


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_too_short_to_score_is_refused(run, here, make_bundle, length):
    (here / "short.txt").write_bytes(b"a" * length)
    bundle = make_bundle(config={"vocab_size": 256}, vocabulary=True)
    assert f"holds {length} tokens, expected at least 2" in run("score", bundle, "short.txt").error


# ---- as a process


def test_a_refusal_is_one_line_and_exit_code_2_of_the_process_too(files):
    with zipfile.ZipFile(files / "archive.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    before = sorted(files.rglob("*"))
    for arguments in (
        ("export", "archive.pt"),
        ("export", "good.pt", "--batch-size", 0),
        ("score", "taken", "ids.npy"),
    ):
        done = cli(*arguments, cwd=files)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        *before_it, error = done.stderr.splitlines()
        assert error.startswith("error: ")
        assert all(line.endswith(" s") for line in before_it)
    assert sorted(files.rglob("*")) == before
