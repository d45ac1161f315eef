"""Reading checkpoint files: what they hold comes out exactly, and nothing they name is ever imported or run."""

import argparse
import collections
import contextlib
import enum
import importlib
import io
import json
import os
import pickle  # noqa: TID251 - the tests write what others wrote with it
import random
import struct
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from txl_export.checkpoints.files.loading import Loaded, load_file, module_state, scan_globals, submodule
from txl_export.checkpoints.files.pickle_names import KNOWN, Stub
from txl_export.checkpoints.plain_weights import read_stored
from txl_runtime.errors import CheckpointError

ORACLE = Path(__file__).parents[3] / "fixtures" / "oracle"
WHOLE_MODELS = [
    "k01_base",
    "k12_not_tied",
    "k30_adp_div2",
    "k50_attn1",
    "k60_attn2_mem0",
    "k70_attn3",
]
NVIDIA = ["n01_base", "n12_adp_div2"]
HUGGING_FACE = ["h01_base", "h03_same_length", "h05_tied_r", "h08_eps", "h12_adp_div2"]
CONTAINERS = {"torch zip": True, "torch legacy": False}

# Stand-ins: the original dotted names and attribute names, nothing of the original code.
SOFTMAX_SOURCE = """
import torch
from torch import nn


class ProjectedAdaptiveLogSoftmax(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.out_layers = nn.ModuleList([nn.Linear(*reversed(table.shape)) for table in tables])
        for layer, table in zip(self.out_layers, tables):
            layer.weight = table
        self.out_projs = nn.ParameterList([None, nn.Parameter(torch.randn(8, 4))])
"""
MODEL_SOURCE = """
import torch
from proj_adaptive_softmax import ProjectedAdaptiveLogSoftmax
from torch import nn


class PositionalEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(4))
        self.register_buffer("scratch", torch.rand(3), persistent=False)


class AdaptiveEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.cutoffs, self.div_val, self.emb_scale = [6, 10], 2, 8**0.5
        self.emb_layers = nn.ModuleList([nn.Embedding(6, 8), nn.Embedding(4, 4)])
        self.emb_projs = nn.ParameterList([nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 4))])


class PositionwiseFF(nn.Module):
    def __init__(self):
        super().__init__()
        self.d_inner = 16
        self.CoreNet = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(16, 8))
        self.layer_norm = nn.LayerNorm(8, eps=1e-3)


class MemTransformerLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_token, self.n_layer, self.same_length, self.clamp_len = 10, 2, False, -1
        self.cutoffs, self.note = [6], None
        self.word_emb, self.pos_emb = AdaptiveEmbedding(), PositionalEmbedding()
        self.layers = nn.ModuleList([PositionwiseFF() for _ in range(2)])
        self.crit = ProjectedAdaptiveLogSoftmax([layer.weight for layer in self.word_emb.emb_layers])
        self.crit.out_projs[1] = self.word_emb.emb_projs[1]
        self.r_w_bias = nn.Parameter(torch.randn(2, 4))
        self.register_buffer("nothing", None)
"""
MODEL_CLASSES = ["AdaptiveEmbedding", "MemTransformerLM", "PositionalEmbedding", "PositionwiseFF"]
PARALLEL_SOURCE = """
from torch.nn import DataParallel


class BalancedDataParallel(DataParallel):
    pass
"""


@contextlib.contextmanager
def modules(folder, **sources):
    """Importable modules that are gone afterwards."""
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in sources})
    finally:
        sys.path.remove(str(folder))
        for name in sources:
            del sys.modules[name]


@contextlib.contextmanager
def watching():
    """In here nobody may look for a module that is not a library's own."""
    asked = []

    class Watch:
        @staticmethod
        def find_spec(name, path=None, target=None):
            asked.append(name)

    sys.meta_path.insert(0, Watch)
    try:
        yield
    finally:
        sys.meta_path.remove(Watch)
        assert {name.partition(".")[0] for name in asked} <= {"torch", "safetensors", "numpy", "encodings"}


def watched_load(path, aliases=None):
    """`load_file`, watched."""
    with watching():
        return load_file(path, aliases)


def save(value, path, zipped=True, **options):
    torch.save(value, path, _use_new_zipfile_serialization=zipped, **options)
    return path


def assert_same(ours, theirs):
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert type(ours[name]) is torch.Tensor
        assert ours[name].dtype == tensor.dtype
        assert not ours[name].requires_grad
        assert torch.equal(ours[name], tensor), name


def arrays(case):
    with np.load(ORACLE / f"{case}.npz") as stored:
        return {key.removeprefix("sd/"): stored[key] for key in stored.files if key.startswith("sd/")}


def assert_plain(value):
    """Walk everything: only the promised types, everything hashable, finite and short to print."""
    assert type(value) in (dict, list, tuple, str, int, float, bool, bytes, type(None), torch.Tensor) or isinstance(
        value, Stub
    )
    if isinstance(value, torch.Tensor):
        value.clone()
    elif isinstance(value, Stub):
        assert_plain(value.state)
        assert_plain(value.args)
    elif isinstance(value, dict):
        for key, item in value.items():
            assert_plain(key)
            assert_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            assert_plain(item)


# --- what is read


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_whole_module_is_read_without_its_classes(tmp_path, container):
    path = tmp_path / "model.pt"
    with modules(tmp_path / "code", proj_adaptive_softmax=SOFTMAX_SOURCE, mem_transformer=MODEL_SOURCE) as code:
        model = code.mem_transformer.MemTransformerLM()
        save(model, path, CONTAINERS[container])
    # The legacy container carries the source text of every class, as persistent ids ('module', …).
    assert (b"class MemTransformerLM(nn.Module)" in path.read_bytes()) == (container == "torch legacy")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mem_transformer")

    loaded = watched_load(path)
    assert loaded.container == container
    assert loaded.content.class_name == "mem_transformer.MemTransformerLM"
    assert loaded.global_names == scan_globals(path)
    assert "proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax" in loaded.global_names
    state, plain = module_state(loaded.content)
    assert_same(state, model.state_dict())
    assert "pos_emb.scratch" not in state
    assert state["crit.out_layers.1.weight"] is state["word_emb.emb_layers.1.weight"]
    assert state["crit.out_projs.1"] is state["word_emb.emb_projs.1"]
    assert state["word_emb.emb_projs.0"] is not state["word_emb.emb_projs.1"]
    assert plain == {
        "n_token": 10,
        "n_layer": 2,
        "same_length": False,
        "clamp_len": -1,
        "cutoffs": [6],
        "note": None,
    }
    assert submodule(loaded.content, "layers.1").state["d_inner"] == 16
    assert submodule(loaded.content, "layers.0.layer_norm").state["eps"] == 1e-3
    assert submodule(loaded.content, "word_emb").state["cutoffs"] == [6, 10]
    assert submodule(loaded.content, "layers.2") is None
    assert not list(tmp_path.glob("*.patch"))
    assert not list(Path().glob("*.patch"))
    assert_plain(loaded.content)


@pytest.mark.parametrize("container", CONTAINERS)
def test_wrappers_for_several_devices_are_removed(tmp_path, container):
    sources = {
        "proj_adaptive_softmax": SOFTMAX_SOURCE,
        "mem_transformer": MODEL_SOURCE,
        "data_parallel": PARALLEL_SOURCE,
    }
    with modules(tmp_path / "code", **sources) as code:
        model = code.mem_transformer.MemTransformerLM()
        wrapped = nn.DataParallel(code.data_parallel.BalancedDataParallel(model))
        save(wrapped, tmp_path / "model.pt", CONTAINERS[container])
    state, plain = module_state(watched_load(tmp_path / "model.pt").content)
    assert_same(state, model.state_dict())
    assert plain["n_token"] == 10


def test_a_fork_that_renamed_its_modules_needs_aliases(tmp_path):
    source = MODEL_SOURCE.replace("proj_adaptive_softmax", "softmax")
    with modules(tmp_path / "code", softmax=SOFTMAX_SOURCE, modules=source) as code:
        model = code.modules.MemTransformerLM()
        path = save(model, tmp_path / "model.pt")
    with pytest.raises(CheckpointError) as refusal:
        watched_load(path)
    names = {f"modules.{n}" for n in MODEL_CLASSES}
    names.add("softmax.ProjectedAdaptiveLogSoftmax")
    assert ", ".join(sorted(names)) in str(refusal.value)
    assert "--alias modules.MemTransformerLM=" in str(refusal.value)

    known = {"modules": "mem_transformer", "softmax": "proj_adaptive_softmax"}
    aliases = {name: f"{known[name.split('.')[0]]}.{name.split('.')[1]}" for name in names}
    loaded = watched_load(path, aliases)
    assert loaded.content.class_name == "mem_transformer.MemTransformerLM"
    assert loaded.global_names == scan_globals(path)
    assert names < set(loaded.global_names)
    assert "modules.MemTransformerLM read as mem_transformer.MemTransformerLM" in loaded.notes
    assert_same(module_state(loaded.content)[0], model.state_dict())
    with pytest.raises(CheckpointError, match=r"aliases lead to os\.system"):
        watched_load(path, {"modules.MemTransformerLM": "os.system"})
    with pytest.raises(CheckpointError, match=r"aliases lead to torch\.FloatStorage"):
        watched_load(path, {"modules.MemTransformerLM": "torch.FloatStorage"})


@pytest.mark.parametrize("case", WHOLE_MODELS)
def test_the_original_whole_module_files(case):
    path = ORACLE / "kimiyoung" / f"{case}.model.zip213.pt"
    loaded = watched_load(path)
    about = json.loads((ORACLE / "kimiyoung" / f"{case}.json").read_text())
    state, plain = module_state(loaded.content)
    assert list(state) == about["sd_keys"]
    for name, array in arrays(f"kimiyoung/{case}").items():
        assert np.array_equal(state[name].numpy(), array), name
    groups = {frozenset(group) for group in about["ties"]}
    by_object = collections.defaultdict(set)
    for name, tensor in state.items():
        by_object[id(tensor)].add(name)
    assert {frozenset(names) for names in by_object.values() if len(names) > 1} == groups
    for name in ("n_token", "n_layer", "n_head", "d_model", "d_head", "attn_type", "tgt_len", "mem_len", "ext_len"):
        assert plain[name] == about["ctor"][name]
    assert submodule(loaded.content, "layers.0.pos_ff").state["d_inner"] == about["ctor"]["d_inner"]
    assert submodule(loaded.content, "layers.0.dec_attn").state["pre_lnorm"] == about["ctor"]["pre_lnorm"]
    assert submodule(loaded.content, "word_emb").state["div_val"] == about["ctor"]["div_val"]
    assert loaded.global_names == scan_globals(path)


@pytest.mark.parametrize("case", WHOLE_MODELS)
def test_the_original_optimizer_files_are_legacy_files(case):
    path = ORACLE / "kimiyoung" / f"{case}.optimizer.pt"
    loaded = watched_load(path)
    assert loaded.container == "torch legacy"
    theirs = torch.load(path, weights_only=True)
    assert loaded.content["param_groups"] == theirs["param_groups"]
    assert list(loaded.content["state"]) == list(theirs["state"])
    for number, entry in theirs["state"].items():
        assert loaded.content["state"][number]["step"] == entry["step"]
        for part in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded.content["state"][number][part], entry[part])


@pytest.mark.parametrize("case", NVIDIA)
def test_the_original_checkpoint_dictionaries(case):
    path = ORACLE / "nvidia" / f"{case}.checkpoint_best.pt"
    loaded = watched_load(path)
    about = json.loads((ORACLE / "nvidia" / f"{case}.json").read_text())
    assert loaded.content["model_config"] == about["model_config"]
    assert list(loaded.content["model_state"]) == about["sd_keys"]
    for name, array in arrays(f"nvidia/{case}").items():
        assert np.array_equal(loaded.content["model_state"][name].numpy(), array), name
    assert loaded.content["args"].class_name == "argparse.Namespace"
    assert loaded.content["args"].state["n_layer"] == about["model_config"]["n_layer"]
    vocabulary = loaded.content["vocab"]
    assert vocabulary.class_name == "utils.vocabulary.Vocab"
    symbols = vocabulary.state["idx2sym"]
    assert vocabulary.state["sym2idx"] == {symbol: i for i, symbol in enumerate(symbols)}
    assert type(vocabulary.state["counter"]) is dict
    assert loaded.global_names == scan_globals(path)


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_the_original_state_dicts(case):
    loaded = watched_load(ORACLE / "hf" / case / "pytorch_model.bin")
    about = json.loads((ORACLE / "hf" / f"{case}.json").read_text())
    for name, array in arrays(f"hf/{case}").items():
        assert np.array_equal(loaded.content[name].numpy(), array), name
    for first, *others in about["ties"]:
        for name in others:
            assert loaded.content[name] is loaded.content[first]
    lean = ORACLE / "hf" / f"{case}.safetensors" / "model.safetensors"
    kept = watched_load(lean)
    assert kept.container == "safetensors"
    assert kept.global_names == scan_globals(lean) == ()
    assert set(kept.content) < set(loaded.content)
    assert all(torch.equal(tensor, loaded.content[name]) for name, tensor in kept.content.items())


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_content_of_every_kind(tmp_path, container, protocol):
    whole = torch.arange(24.0)
    content = {
        "numbers": [1, -7, 1 << 40, 1 << 100, 0.1, True, False, None, 2.5e300],
        "text": ("Grüße", "", "\x00\n", "x" * 70000),
        ("a", 1): b"bytes\xff",
        3: collections.OrderedDict(a=collections.Counter("abca")),
        "default": collections.defaultdict(list, {"k": [1]}),
        "set": {5},
        "args": argparse.Namespace(mem_len=4, work_dir=Path("runs")),
        "size": torch.Size([2, 3]),
        "types": [torch.float16, torch.device("cpu")],
        "views": [whole[4:8], whole.view(4, 6).t(), whole[3], whole[24:], torch.empty(0, 5)],
        "dtypes": [
            torch.arange(5).to(getattr(torch, t))
            for t in ("float64", "float16", "bfloat16", "int32", "int16", "int8", "uint8", "bool")
        ],
    }
    path = save(content, tmp_path / "content.pt", CONTAINERS[container], pickle_protocol=protocol)
    loaded = watched_load(path)
    assert loaded.container == container
    assert loaded.global_names == scan_globals(path)
    ours = loaded.content
    assert list(ours) == list(content)
    for name in ("numbers", "text", ("a", 1)):
        assert ours[name] == content[name]
    assert [type(n) for n in ours["numbers"]] == [type(n) for n in content["numbers"]]
    assert ours[3] == {"a": {"a": 2, "b": 1, "c": 1}}
    assert type(ours[3]) is dict
    assert ours["default"] == {"k": [1]}
    assert ours["set"] == [5]
    assert ours["args"].state["mem_len"] == 4
    assert ours["args"].state["work_dir"].args == ("runs",)
    assert ours["size"] == (2, 3)
    assert [kind.class_name for kind in ours["types"]] == ["torch.float16", "torch.device"]
    for kind in ("views", "dtypes"):
        for tensor, original in zip(ours[kind], content[kind], strict=True):
            assert tensor.shape == original.shape
            assert tensor.stride() == original.stride()
            assert torch.equal(tensor, original)
    assert_plain(ours)


class Activation(enum.Enum):
    RELU = 1
    GELU = 3

    def __reduce_ex__(self, protocol):
        return type(self), (self.value,)


def init_transformer():
    pass


@pytest.mark.parametrize("container", CONTAINERS)
def test_enums_functions_and_random_states_become_stubs(tmp_path, container, monkeypatch):
    module = types.ModuleType("fastai.text.models.transformer")
    for part in ("fastai", "fastai.text", "fastai.text.models"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for thing in (Activation, init_transformer):
        monkeypatch.setattr(thing, "__module__", module.__name__)
        monkeypatch.setattr(module, thing.__name__, thing, raising=False)
    content = {
        "model": {"0.encoder.weight": torch.ones(2, 2)},
        "config": {"act": Activation.GELU, "init": init_transformer, "n_layers": 2},
        "np_rng_state": np.random.RandomState(0).get_state(),
        "loss": np.float64(1.5),
        "random_rng_state": random.Random(0).getstate(),
        "torch_rng_state": torch.get_rng_state(),
    }
    loaded = watched_load(save(content, tmp_path / "fastai.pth", CONTAINERS[container]))
    config = loaded.content["config"]
    assert (config["act"].class_name, config["act"].args) == ("fastai.text.models.transformer.Activation", (3,))
    assert config["init"].class_name == "fastai.text.models.transformer.init_transformer"
    assert config["n_layers"] == 2
    kind, keys, position, *_ = loaded.content["np_rng_state"]
    assert (kind, position) == ("MT19937", 624)
    assert isinstance(keys, Stub)
    assert keys.state == {}
    assert loaded.content["random_rng_state"] == content["random_rng_state"]
    assert torch.equal(loaded.content["torch_rng_state"], content["torch_rng_state"])
    assert_plain(loaded.content)


def test_a_file_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"w": torch.arange(9.0)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert watched_load(path).content["w"].tolist() == list(range(9))


def test_the_hash_is_the_file_s(tmp_path):
    path = save({"w": torch.zeros(3)}, tmp_path / "model.pt")
    first = load_file(path).sha256
    assert len(first) == 64
    assert load_file(save({"w": torch.ones(3)}, tmp_path / "other.pt")).sha256 != first
    assert load_file(path).sha256 == first


def test_what_is_no_module_is_refused_as_one():
    with pytest.raises(CheckpointError, match="has no _"):
        module_state(Stub("argparse.Namespace", {"a": 1}))
    with pytest.raises(CheckpointError, match="holds no module"):
        module_state(Stub("torch.nn.parallel.data_parallel.DataParallel", {"_modules": {}}))
    parts = {"_parameters": {"w": 3}, "_buffers": {}, "_modules": {}}
    with pytest.raises(CheckpointError, match="w is not a tensor"):
        module_state(Stub("mem_transformer.MemTransformerLM", parts))


# --- what is refused: programs written by hand, one instruction after the other


def code(value):
    """The instructions that push a value; bytes stand for themselves."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(code, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(code, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(code(key) + code(item) for key, item in value.items()) + b"u"
    return pickle.dumps(value, 2)[2:-1]


def name(dotted):
    module, _, attribute = dotted.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(dotted, *args):
    return name(dotted) + code(args) + b"R"


def reference(*args):
    return code(args) + b"Q"


def storage(count=4, key="0", kind="torch.FloatStorage", location="cpu", extra=()):
    return reference("storage", name(kind), key, location, count, *extra)


def tensor(where=None, offset=0, size=(4,), stride=(1,), metadata=()):
    hooks = call("collections.OrderedDict")
    where = storage() if where is None else where
    return call("torch._utils._rebuild_tensor_v2", where, offset, size, stride, False, hooks, *metadata)


def binary(data):
    return b"B" + struct.pack("<I", len(data)) + data


def program(body, protocol=2):
    return bytes([0x80, protocol]) + code(body) + b"."


def write_zip(path, body, data=bytes(16)):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program(body))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", data)
        archive.writestr("archive/version", "3\n")


def write_legacy(path, body, data=bytes(16), keys=("0",), count=4, magic=0x1950A86A20F9469CFC6C, protocol=1001):
    with path.open("wb") as file:
        for part in (magic, protocol, {"little_endian": True}, body, keys if isinstance(keys, dict) else list(keys)):
            file.write(program(part))
        for _ in keys:
            file.write(struct.pack("<q", count) + data)


WRITERS = {"torch zip": write_zip, "torch legacy": write_legacy}


def refused(path, match, canary=None):
    with pytest.raises(CheckpointError, match=match) as refusal:
        watched_load(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < 3000
    assert canary is None or not canary.exists()
    return message


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_hand_written_files_are_sound(tmp_path, container):
    WRITERS[container](tmp_path / "ok.pt", [tensor(), tensor(), {"a": 1}], np.arange(4, dtype="<f4").tobytes())
    first, second, mapping = watched_load(tmp_path / "ok.pt").content
    assert first.tolist() == [0, 1, 2, 3]
    assert second is first
    assert mapping == {"a": 1}


def shell(canary):
    return f"touch {canary}"


def old_module(cls, **state):
    """An object of a class that is a persistent id, with the attributes torch 1.0 gave modules."""
    backend = call("torch.nn.backends.thnn._get_thnn_function_backend")
    parts = {part: call("collections.OrderedDict") for part in ("_parameters", "_buffers", "_modules")}
    attributes = {"_backend": backend, **parts, "training": True, **state}
    return reference("module", name(cls), "/old/place.py", "class Old: ...") + b")\x81" + code(attributes) + b"b"


def test_a_module_as_torch_1_wrote_it(tmp_path):
    first = call("torch._utils._rebuild_parameter", tensor(storage(extra=(None,))), True, {})
    projections = old_module("torch.nn.modules.container.ParameterList", _parameters={"0": None, "1": first})
    softmax = old_module("proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax", _modules={"out_projs": projections})
    model = old_module("mem_transformer.MemTransformerLM", _modules={"crit": softmax, "none": None}, d_model=4)
    write_legacy(tmp_path / "model.pt", model, np.arange(4, dtype="<f4").tobytes())
    state, plain = module_state(watched_load(tmp_path / "model.pt").content)
    assert {name: tensor.tolist() for name, tensor in state.items()} == {"crit.out_projs.1": [0, 1, 2, 3]}
    assert plain == {"d_model": 4}


def test_where_a_file_was_saved_does_not_matter(tmp_path):
    where = storage(kind="torch.cuda.FloatStorage", location="cuda:3")
    write_zip(tmp_path / "model.pt", [tensor(where)])
    assert watched_load(tmp_path / "model.pt").content[0].device == torch.device("cpu")


# name → (the instructions, given the command that would betray them; what the message says)
ATTACKS = {
    "os.system": (lambda command: call("os.system", command), r"refers to os\.system"),
    "posix.system": (lambda command: call("posix.system", command), r"refers to posix\.system"),
    "subprocess": (lambda command: call("subprocess.getoutput", command), r"subprocess\.getoutput"),
    "builtins.eval": (
        lambda command: call("builtins.eval", f"__import__('os').system({command!r})"),
        r"refers to builtins\.eval",
    ),
    "python 2's eval": (lambda command: call("__builtin__.eval", "1"), r"refers to __builtin__\.eval"),
    "inside a list in a dict": (lambda command: {"model": [tensor(), call("os.system", command)]}, r"os\.system"),
    "getattr": (
        lambda command: call("builtins.getattr", name("torch.Tensor"), "__class__"),
        r"refers to builtins\.getattr",
    ),
    "getattr of an allowed name": (
        lambda command: call("operator.attrgetter", "__globals__"),
        r"refers to operator\.attrgetter",
    ),
    "a class of the right name elsewhere": (
        lambda command: name("evil.MemTransformerLM") + b")\x81}b",
        r"refers to evil\.MemTransformerLM",
    ),
    "a longer path to an allowed name": (lambda command: name("x.torch._utils._rebuild_tensor_v2"), r"refers to x\."),
    "a path of attributes": (
        lambda command: code("torch") + code("serialization.os.system") + b"\x93" + code((command,)) + b"R",
        r"refers to torch\.serialization\.os\.system",
    ),
    "a known function by a path of attributes": (
        lambda command: code("torch") + code("_utils._rebuild_tensor_v2") + b"\x93",
        r"refers to torch\._utils\._rebuild_tensor_v2",
    ),
    "a name that is no text": (lambda command: code(3) + code("x") + b"\x93", "computes a name"),
    "a nested file": (
        lambda command: call("torch.storage._load_from_bytes", binary(program(call("os.system", command)))),
        "saved by pickle, not by torch.save",
    ),
    "a tensor by pickle": (lambda command: pickle.dumps(torch.ones(3), 2)[2:-1], "saved by pickle, not by torch.save"),
    "INST": (lambda command: b"(" + code(command) + b"ios\nsystem\n", "instruction INST"),
    "OBJ": (lambda command: b"(" + name("argparse.Namespace") + code(command) + b"o", "instruction OBJ"),
    "NEWOBJ_EX": (lambda command: name("argparse.Namespace") + b")}\x92", "instruction NEWOBJ_EX"),
    "NEWOBJ of a function": (lambda command: name("os.system") + code((command,)) + b"\x81", r"os\.system"),
    "EXT1": (lambda command: b"\x82\x01", "instruction EXT1"),
    "EXT4": (lambda command: b"\x84\x01\x00\x00\x00", "instruction EXT4"),
    "PERSID": (lambda command: b"Pstorage\n", "instruction PERSID"),
    "NEXT_BUFFER": (lambda command: b"\x97", "instruction NEXT_BUFFER"),
    "DUP": (lambda command: code(1) + b"2", "instruction DUP"),
    "a call of an object": (lambda command: name("argparse.Namespace") + b")R)R", "calls something that is not a name"),
    "a call of text": (lambda command: code("os.system") + code((command,)) + b"R", "calls something"),
    "a call of a storage": (lambda command: call("torch.FloatStorage", 4), r"calls torch\.FloatStorage"),
    "a call without a tuple": (lambda command: name("argparse.Namespace") + code([1]) + b"R", "calls something"),
    "attributes of a tensor": (lambda command: tensor() + code({"__class__": 1}) + b"b", "attributes of a Tensor"),
    "attributes of a size": (
        lambda command: call("torch.Size", (1, 2)) + code({"x": 1}) + b"b",
        "attributes of a tuple",
    ),
    "attributes of a class": (
        lambda command: name("mem_transformer.MemTransformerLM") + code({"forward": 1}) + b"b",
        "attributes of a Name",
    ),
    "attributes that are no names": (
        lambda command: name("argparse.Namespace") + b")\x81" + code({1: 2}) + b"b",
        "not a dictionary of names",
    ),
    "attributes that are no dictionary": (
        lambda command: name("argparse.Namespace") + b")\x81" + code([1]) + b"b",
        "not a dictionary of names",
    ),
    "items of an object": (
        lambda command: name("argparse.Namespace") + b")\x81" + code("a") + code(1) + b"s",
        "sets items of a Stub",
    ),
    "items of a tuple": (lambda command: code((1,)) + code(1) + b"a", "appends to a tuple"),
    "a deep key": (lambda command: b"}" + b")" + b"\x85" * 99 + code(1) + b"s", "key of type tuple"),
    "a list as key": (lambda command: b"}]Ns", "key of type list"),
    "a tensor as key": (lambda command: b"}" + tensor() + b"Ns", "key of type Tensor"),
    "a bare storage": (lambda command: storage(), "has a Storage where plain data was expected"),
    "persistent id that is a number": (lambda command: code(7) + b"Q", "not a storage of a known type"),
    "persistent id of another kind": (lambda command: reference("file", "/etc/passwd"), "not a storage"),
    "a module that is no class": (lambda command: reference("module", "os", "a", "b"), "not a storage"),
    "a storage of no type": (lambda command: storage(kind="argparse.Namespace"), "not a storage of a known type"),
    "a storage of text type": (
        lambda command: reference("storage", "torch.FloatStorage", "0", "cpu", 4),
        "not a storage of a known type",
    ),
    "a quantised storage": (lambda command: storage(kind="torch.QInt8Storage"), r"refers to torch\.QInt8Storage"),
    "a sparse tensor": (lambda command: call("torch._utils._rebuild_sparse_tensor", 1), "_rebuild_sparse_tensor"),
    "a meta tensor": (
        lambda command: call("torch._utils._rebuild_meta_tensor_no_storage", 1),
        "_rebuild_meta_tensor_no_storage",
    ),
    "a storage of two types": (
        lambda command: [tensor(), tensor(storage(kind="torch.IntStorage"))],
        "at once",
    ),
    "a storage larger than the file": (lambda command: tensor(storage(1 << 50)), r"does not fit|the file has 16 bytes"),
    "a storage of negative size": (lambda command: tensor(storage(-4)), "has -4 elements"),
    "a storage of size True": (lambda command: tensor(storage(True)), "not a storage|has True elements"),
    "a tensor of negative size": (lambda command: tensor(size=(-1,)), "the shape of a tensor"),
    "a negative stride": (lambda command: tensor(size=(2,), stride=(-1,), offset=2), "the stride of a tensor"),
    "a negative offset": (lambda command: tensor(offset=-1), "the offset of a tensor"),
    "a tensor behind its storage": (lambda command: tensor(offset=1), "does not fit into its storage"),
    "an offset behind the storage": (lambda command: tensor(offset=5, size=(0,)), "does not fit into its storage"),
    "a stride out of its storage": (
        lambda command: tensor(size=(2, 2), stride=(3, 1)),
        "does not fit into its storage",
    ),
    "an expanded tensor": (lambda command: tensor(size=(1 << 40,), stride=(0,)), "does not fit into its storage"),
    "a huge stride": (lambda command: tensor(size=(1,), stride=(1 << 70,)), "the stride of a tensor"),
    "strides that overflow": (
        lambda command: tensor(size=(2, 2), stride=(1 << 61, 1 << 61)),
        "does not fit into its storage",
    ),
    "an empty tensor of a huge shape": (lambda command: tensor(size=(0, 1 << 50), stride=(1, 1)), "does not fit"),
    "sizes without strides": (lambda command: tensor(size=(2, 2)), "2 sizes and 1 strides"),
    "a tensor of text": (lambda command: tensor(code("storage")), "not described by storage"),
    "a conjugate view": (
        lambda command: tensor(metadata=({"conj": True},)),
        "conjugate",
    ),
    "a parameter of text": (
        lambda command: call("torch._utils._rebuild_parameter", "x", True, {}),
        "not made of a tensor",
    ),
    "a tensor of a class": (
        lambda command: call("torch._tensor._rebuild_from_type_v2", name("argparse.Namespace"), 1, (), {}),
        "a kind that is not read here",
    ),
    "pairs that are none": (lambda command: call("collections.OrderedDict", ["ab"]), "not made of pairs"),
    "bytes in another encoding": (lambda command: call("_codecs.encode", "x", "rot13"), "other than latin1"),
    "lists in lists without end": (lambda command: b"]" * 200_000 + b"a" * 199_999, "levels deep"),
    "tuples in tuples without end": (lambda command: b")" + b"\x85" * 200_000, "levels deep"),
    "a list of itself": (lambda command: b"]q\x01h\x01a", "contains itself"),
    "a dictionary of itself": (lambda command: b"}q\x01" + code("a") + b"h\x01s", "contains itself"),
    "doubling": (
        lambda command: b"]" + b"".join(b"q\x01h\x01\x86" for _ in range(100)),
        "stands for more than",
    ),
    "an integer of a million bits": (
        lambda command: b"\x8b" + struct.pack("<i", 125_000) + b"\x7f" * 125_000,
        "an integer of",
    ),
    "an integer as digits": (lambda command: b"L" + b"9" * 5000 + b"L\n", "damaged|instruction LONG"),
    "text longer than the file": (lambda command: b"X\xff\xff\xff\x7fabc", "cut short or damaged"),
    "bytes longer than memory": (lambda command: b"\x8e" + b"\xff" * 7 + b"\x7f", "cut short or damaged"),
    "nothing on the stack": (lambda command: b"a", "cut short or damaged"),
    "no mark": (lambda command: b"t", "cut short or damaged"),
    "two contents": (lambda command: b"NN", "cut short or damaged"),
    "a memo that is not there": (lambda command: b"h\x07", "cut short or damaged"),
    "an unknown instruction": (lambda command: b"\xff", "cut short or damaged"),
    "a name with an odd escape": (lambda command: name("mem\\hx.M"), r"refers to .*M"),
    "an unprintable name": (lambda command: code("a\nb\x1b[2J") + code("c" * 999) + b"\x93", r"refers to 'a\\nb"),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(tmp_path, container, attack):
    body, match = ATTACKS[attack]
    canary, path = tmp_path / "canary", tmp_path / "model.pt"
    body = code(body(shell(canary)))
    WRITERS[container](path, body)
    refused(path, match, canary)
    # The names are still shown, whatever else is wrong with the file.
    assert all(shown.isprintable() for shown in scan_globals(path))
    if match.startswith("refers to") and "path of attributes" not in attack:
        assert not set(scan_globals(path)) <= KNOWN


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_in_a_plain_pickle_runs_nothing(tmp_path, attack):
    """Where other objects are stand-ins, much of this is harmless data; nothing of it may be run or imported."""
    body, _ = ATTACKS[attack]
    canary, path = tmp_path / "canary", tmp_path / "model.pkl"
    path.write_bytes(program(body(shell(canary)), protocol=4))
    with contextlib.suppress(CheckpointError), watching():
        assert_plain(read_stored(path))
    assert not canary.exists()


# --- what is refused: containers


def patched(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def central(data, number):
    """Where the directory's entry of that number begins."""
    at = -1
    for _ in range(number + 1):
        at = data.index(b"PK\x01\x02", at + 1)
    return at


def zip_bytes(entries, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return file.getvalue()


PROGRAM = program(tensor())
ENTRIES = [("a/data.pkl", PROGRAM), ("a/data/0", bytes(16)), ("a/version", "3\n")]


def overlapping(number, other):
    data = zip_bytes(ENTRIES)
    offset = data[central(data, other) + 42 :][:4]
    return patched(data, central(data, number) + 42, offset)


def tar_bytes():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def legacy_bytes(**options):
    path = io.BytesIO()
    path.open = lambda mode: contextlib.nullcontext(path)
    write_legacy(path, options.pop("body", tensor()), **options)
    return path.getvalue()


def safetensors_bytes(header, data=bytes(16)):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def described(dtype="F32", shape=(4,), first=0, last=16):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


HALF_FILE = [tensor(storage(60, key)) for key in "0123456789"]

# name → (the file's bytes, what the message says[, the file's name])
FILES = {
    "a zip bomb": (
        lambda: zip_bytes([("a/data.pkl", PROGRAM), ("a/data/0", bytes(1 << 24))], zipfile.ZIP_DEFLATED),
        "compressed or encrypted",
    ),
    "encrypted": (lambda: patched(zip_bytes(ENTRIES), central(zip_bytes(ENTRIES), 1) + 8, b"\x01"), "or encrypted"),
    "overlapping entries": (lambda: overlapping(1, 0), "overlaps another entry"),
    "overlapping entries the other way": (lambda: overlapping(0, 1), "overlaps another|not where"),
    "an entry inside another": (
        lambda: patched(zip_bytes(ENTRIES), central(zip_bytes(ENTRIES), 1) + 42, struct.pack("<I", 40)),
        "overlaps another entry",
    ),
    "an entry behind the file": (
        lambda: patched(zip_bytes(ENTRIES), central(zip_bytes(ENTRIES), 1) + 42, b"\xff\xff\xff\x7f"),
        "overlaps another entry|no directory|not where it should be",
    ),
    "an entry into the directory": (
        lambda: patched(zip_bytes(ENTRIES), central(zip_bytes(ENTRIES), 2) + 20, struct.pack("<II", 40, 40)),
        "not where it should be",
    ),
    "no local header": (
        lambda: patched(zip_bytes(ENTRIES), zip_bytes(ENTRIES).index(b"PK\x03\x04", 9), b"xx"),
        "not where",
    ),
    "a wrong checksum": (
        lambda: patched(zip_bytes(ENTRIES), zip_bytes(ENTRIES).index(b"a/data/0") + 8 + 5, b"\x01"),
        "checksum of a/data/0 is wrong",
    ),
    "a wrong checksum of the pickle": (
        lambda: zip_bytes(ENTRIES).replace(b"rebuild_tensor_v2", b"rebuild_tensor_v3", 1),
        "checksum of a/data.pkl is wrong",
    ),
    "a missing storage": (lambda: zip_bytes([*ENTRIES[:1], *ENTRIES[2:]]), "there is none"),
    "a short storage": (lambda: zip_bytes([ENTRIES[0], ("a/data/0", bytes(12))]), "the file has 12 bytes"),
    "no pickle": (lambda: zip_bytes(ENTRIES[1:]), "with 0 data.pkl"),
    "two pickles": (lambda: zip_bytes([*ENTRIES, ("b/data.pkl", b"N.")]), "with 2 data.pkl"),
    "TorchScript": (lambda: zip_bytes([*ENTRIES, ("a/code/__torch__.py", "")]), "TorchScript archive.*state_dict"),
    "big-endian": (lambda: zip_bytes([*ENTRIES, ("a/byteorder", "big")]), "big-endian"),
    "an empty zip archive": (lambda: zip_bytes([]), "zip archive"),
    "another magic number": (lambda: patched(legacy_bytes(), 2, b"\x8a\x0bl"), "did not write"),
    "a magic number that is only text": (
        lambda: program({"x": binary(struct.pack("10s", b"") + b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")}),
        "expected a file by torch.save",
    ),
    "another protocol": (lambda: legacy_bytes(protocol=1000), "not protocol 1001"),
    "storages that are not listed": (lambda: legacy_bytes(keys=()), "0 storages are listed and 1 used"),
    "storages that are not used": (lambda: legacy_bytes(keys=("0", "1")), "2 storages are listed and 1 used"),
    "a storage listed twice": (lambda: legacy_bytes(keys=("0", "0")), "no list of names"),
    "storages in no list": (lambda: legacy_bytes(keys={"0": 1}), "no list of names"),
    "another number of elements": (lambda: legacy_bytes(count=3), "does not have 4 elements"),
    "a negative number of elements": (lambda: legacy_bytes(count=-1), "does not have 4 elements"),
    "a storage cut short": (lambda: legacy_bytes(data=bytes(15)), "a storage ends with the file"),
    "storages larger than the file together": (lambda: legacy_bytes(body=HALF_FILE), "storage 5 of 60 .* does not fit"),
    "a part outside its storage": (
        lambda: legacy_bytes(body=tensor(storage(extra=(("1", 3, 2),)), size=(2,))),
        "lies outside it",
    ),
    "a part of negative size": (
        lambda: legacy_bytes(body=tensor(storage(extra=(("1", 0, -1),)))),
        "not a tuple of numbers",
    ),
    "a part that is none": (lambda: legacy_bytes(body=tensor(storage(extra=("1",)))), "damaged"),
    "a tensor outside its part": (
        lambda: legacy_bytes(body=tensor(storage(extra=(("1", 1, 2),)), size=(3,))),
        "does not fit into its storage of 2 elements",
    ),
    "a part in a zip archive": (
        lambda: zip_bytes([("a/data.pkl", program(tensor(storage(extra=(None,))))), *ENTRIES[1:]]),
        "not a storage of a known type",
    ),
    "a class reference in a zip archive": (
        lambda: zip_bytes([("a/data.pkl", program(reference("module", name("argparse.Namespace"), "a", "b")))]),
        "not a storage of a known type",
    ),
    "a tar container": (tar_bytes, "tar archive.*torch < 0.4"),
    "a plain pickle": (lambda: pickle.dumps({"a": 1}), "a pickle that torch.save did not write"),
    "a hostile plain pickle": (lambda: program(call("os.system", "true")), "a pickle that torch.save did not write"),
    "nothing": (lambda: b"", "the file is empty"),
    "text": (lambda: "Grüße aus der Höhle\n".encode() * 9, "looks like text .*Gr"),
    "a little text": (lambda: b"hello", "looks like text"),
    "a Git LFS pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "TensorFlow's index": (lambda: bytes(40) + bytes.fromhex("57fb808b247547db"), "TensorFlow"),
    "TensorFlow's data": (lambda: bytes(40), "TensorFlow", "model.ckpt-7.data-00000-of-00001"),
    "Keras": (lambda: b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
    "ONNX": (lambda: b"\x08\x08\x12\x07pytorch", "ONNX", "model.onnx"),
    "gzip": (lambda: b"\x1f\x8b\x08" + bytes(40), "compressed; unpack"),
    "something else": (lambda: bytes(range(200, 250)), "begins with c8 c9"),
    "safetensors: a header longer than the file": (
        lambda: patched(safetensors_bytes({"a": described()}), 0, b"\xff\xff"),
        "not a valid safetensors file",
        "model.safetensors",
    ),
    "safetensors: no JSON": (lambda: struct.pack("<Q", 4) + b"{abc" + bytes(16), "not a valid safetensors file"),
    "safetensors: data behind the file": (lambda: safetensors_bytes({"a": described(last=1 << 40)}), "not a valid"),
    "safetensors: a wrong size": (lambda: safetensors_bytes({"a": described(shape=(1 << 40,))}), "not a valid"),
    "safetensors: a negative size": (lambda: safetensors_bytes({"a": described(shape=(-4,))}), "not a valid"),
    "safetensors: an unknown type": (lambda: safetensors_bytes({"a": described(dtype="Q9")}), "not a valid"),
    "safetensors: overlapping": (
        lambda: safetensors_bytes({"a": described(), "b": described()}),
        "not a valid safetensors file",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_sound_checkpoint_is_refused(tmp_path, kind):
    build, match, *names = FILES[kind]
    path = tmp_path / (names[0] if names else "model.pt")
    path.write_bytes(build())
    refused(path, match)
    with contextlib.suppress(CheckpointError):  # an answer or a refusal, nothing else
        scan_globals(path)


def test_an_entry_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        (tmp_path / "model.pt").write_bytes(zip_bytes([*ENTRIES, ENTRIES[1]]))
    refused(tmp_path / "model.pt", "not where it should be")


def test_the_hand_written_containers_are_sound(tmp_path):
    path = tmp_path / "model.pt"
    for data in (zip_bytes(ENTRIES), legacy_bytes(), safetensors_bytes({"a": described()})):
        path.write_bytes(data)
        content = watched_load(path).content
        assert torch.equal(content["a"] if isinstance(content, dict) else content, torch.zeros(4))


def test_a_part_of_a_legacy_storage(tmp_path):
    path = tmp_path / "model.pt"
    part = storage(extra=(("1", 1, 2),))
    body = [tensor(part, size=(2,)), tensor(storage(extra=(None,))), tensor(part, size=(2,))]
    path.write_bytes(legacy_bytes(body=body, data=np.arange(4, dtype="<f4").tobytes()))
    first, whole, again = watched_load(path).content
    assert first.tolist() == [1, 2]
    assert whole.tolist() == [0, 1, 2, 3]
    assert again is first


def test_what_is_no_file_is_refused(tmp_path):
    refused(tmp_path / "missing.pt", "no such file")
    refused(tmp_path, "this is a folder")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    for path in (tmp_path / "missing.pt", tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError):
            scan_globals(path)


def test_names_of_refused_files_are_shown(tmp_path):
    path = tmp_path / "model.pt"
    evil = call("os.system", "true")
    path.write_bytes(program([evil, name("mem_transformer.MemTransformerLM")]))
    assert scan_globals(path) == ("mem_transformer.MemTransformerLM", "os.system")
    path.write_bytes(program([evil])[:-1] + b"\xff" + name("a.b"))
    assert scan_globals(path) == ("os.system",)
    path.write_bytes(pickle.dumps({"a": collections.Counter(), "b": argparse.Namespace()}, 4))
    assert scan_globals(path) == ("argparse.Namespace", "collections.Counter")
    path.write_bytes(program(code("os") + code("system") + code(1) + b"0\x93"))
    assert scan_globals(path) == ("?.?",)  # put together in an unusual way, and visibly so
    with pytest.raises(CheckpointError, match="looks like text"):
        scan_globals(Path(__file__))


# --- damage


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory):
    """One small file of each container, by name."""
    folder = tmp_path_factory.mktemp("valid")
    content = {
        "model": {f"layers.{i}.weight": torch.arange(12.0).view(3, 4) + i for i in range(3)},
        "args": argparse.Namespace(mem_len=4, name="x"),
        "counter": collections.Counter("hello"),
        "half": torch.ones(2).half(),
    }
    save(content, folder / "torch zip")
    save(content, folder / "torch legacy", zipped=False)
    safetensors.torch.save_file(content["model"], folder / "safetensors")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("container", [*CONTAINERS, "safetensors"])
def test_a_file_cut_short_anywhere_is_refused(tmp_path, valid_files, container):
    path, data = tmp_path / "model.pt", valid_files[container]
    path.write_bytes(data)
    assert watched_load(path).container == container
    for percent in range(100):
        path.write_bytes(data[: len(data) * percent // 100])
        with pytest.raises(CheckpointError):
            watched_load(path)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError):
        watched_load(path)


@pytest.mark.parametrize(
    "start",
    [b"", b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02", b"\x80\x04", b"\x10" + bytes(7) + b"{"],
)
def test_noise_is_refused(tmp_path, start):
    path = tmp_path / "model.pt"
    noise = random.Random(5)
    for length in (1, 30, 500, 5000):
        path.write_bytes(start + noise.randbytes(length))
        with pytest.raises(CheckpointError):
            watched_load(path)


PLACES = st.floats(0, 1, exclude_max=True)
EDITS = st.one_of(
    st.tuples(st.just("change"), PLACES, st.integers(1, 255)),
    st.tuples(st.just("delete"), PLACES, st.integers(1, 40)),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("splice"), PLACES, PLACES, st.integers(1, 200)),
)


def edited(data, edit, area):
    """The bytes after one edit within the first `area` of them."""
    kind, place, *how = edit
    at = int(place * area)
    if kind == "change":
        return patched(data, at, bytes([data[at] ^ how[0]]))
    if kind == "delete":
        return data[:at] + data[at + how[0] :]
    if kind == "insert":
        return data[:at] + how[0] + data[at:]
    source = int(how[0] * area)
    return patched(data, at, data[source : source + how[1]])[: len(data)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    container=st.sampled_from([*CONTAINERS, "pickle in a zip", "safetensors"]),
    edits=st.lists(EDITS, min_size=1, max_size=4),
)
def test_a_damaged_file_loads_or_is_refused(tmp_path, valid_files, container, edits):
    path = tmp_path / "model.pt"
    if container == "pickle in a zip":  # with a checksum that fits, so that the damage reaches the interpreter
        with zipfile.ZipFile(io.BytesIO(valid_files["torch zip"])) as archive:
            entries = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
        for edit in edits:
            entries["data.pkl"] = edited(entries["data.pkl"] + b".", edit, len(entries["data.pkl"]))
        data = zip_bytes([(f"a/{name}", entry) for name, entry in entries.items()])
    else:
        data = valid_files[container]
        for edit in edits:
            data = edited(data + b"\0", edit, len(data))[:-1]
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        loaded = watched_load(path)
        assert isinstance(loaded, Loaded)
        assert_plain(loaded.content)
    with contextlib.suppress(CheckpointError):
        scan_globals(path)
