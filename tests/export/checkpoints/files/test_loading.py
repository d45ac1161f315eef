"""Reading checkpoint files: what they hold comes out exactly, and nothing they name is ever imported or run."""

import argparse
import collections
import contextlib
import importlib
import json
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from pickle_programs import CONTAINERS, assert_plain, watched_load
from torch import nn
from txl_export.checkpoints.files.loading import load_file, scan_globals
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.modules import module_state, submodule
from txl_runtime.errors import CheckpointError

ORACLE = Path(__file__).parents[3] / "fixtures" / "oracle"
WHOLE_MODELS = ["k01_base", "k12_not_tied", "k30_adp_div2", "k50_attn1", "k60_attn2_mem0", "k70_attn3"]
NVIDIA = ["n01_base", "n12_adp_div2"]
HUGGING_FACE = ["h01_base", "h03_same_length", "h05_tied_r", "h08_eps", "h12_adp_div2"]

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
    assert plain == {"n_token": 10, "n_layer": 2, "same_length": False, "clamp_len": -1, "cutoffs": [6], "note": None}
    assert submodule(loaded.content, "layers.1").state["d_inner"] == 16
    assert submodule(loaded.content, "layers.0.layer_norm").state["eps"] == 1e-3
    assert submodule(loaded.content, "word_emb").state["cutoffs"] == [6, 10]
    assert submodule(loaded.content, "layers.2") is None
    assert not list(tmp_path.glob("*.patch"))
    assert not list(Path().glob("*.patch"))
    assert_plain(loaded.content)


def test_wrappers_for_several_devices_are_removed(tmp_path):
    sources = {
        "proj_adaptive_softmax": SOFTMAX_SOURCE,
        "mem_transformer": MODEL_SOURCE,
        "data_parallel": "from torch.nn import DataParallel\n\n\nclass BalancedDataParallel(DataParallel):\n    pass\n",
    }
    with modules(tmp_path / "code", **sources) as code:
        model = code.mem_transformer.MemTransformerLM()
        wrapped = nn.DataParallel(code.data_parallel.BalancedDataParallel(model))
        save(wrapped, tmp_path / "model.pt")
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


@pytest.mark.parametrize(
    ("container", "protocol"), [("torch zip", 2), ("torch zip", 4), ("torch legacy", 3), ("torch legacy", 5)]
)
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
        "random": [random.Random(0).getstate(), np.random.RandomState(0).get_state()],
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
    assert ours["random"][0] == content["random"][0]
    assert (ours["random"][1][0], ours["random"][1][1].state) == ("MT19937", {})
    for kind in ("views", "dtypes"):
        for tensor, original in zip(ours[kind], content[kind], strict=True):
            assert tensor.shape == original.shape
            assert tensor.stride() == original.stride()
            assert torch.equal(tensor, original)
    assert_plain(ours)


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
