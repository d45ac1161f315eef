"""Files as each code base writes them, with stand-ins for its classes: imported as the bare state with its config is.

The classes here have the originals' dotted names and attributes and nothing of their code.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
from oracle import state_and_config as case
from support import ORACLE
from torch import nn
from txl_export.checkpoints import read_checkpoint
from txl_export.checkpoints.imported import ConfigNeededError, Imported
from txl_export.families.transformer_xl.family import prepare
from txl_export.families.transformer_xl.weights import Weights, check_weights
from txl_export.options import ExportOptions
from txl_runtime.errors import CheckError, CheckpointError, UsageError
from txl_runtime.listener import Silent

SOURCES = {
    "mem_transformer": "AdaptiveEmbedding MemTransformerLM PositionalEmbedding PositionwiseFF "
    "RelPartialLearnableDecoderLayer RelPartialLearnableMultiHeadAttn",
    "proj_adaptive_softmax": "ProjectedAdaptiveLogSoftmax",
    "modules": "Embeddings MemTransformerLM PositionalEmbedding PositionwiseFF RelPartialLearnableDecoderLayer "
    "RelPartialLearnableMultiHeadAttn",
}
PLACES = {
    "": "MemTransformerLM",
    "word_emb": "AdaptiveEmbedding",
    "pos_emb": "PositionalEmbedding",
    r"layers\.\d+": "RelPartialLearnableDecoderLayer",
    r"layers\.\d+\.dec_attn": "RelPartialLearnableMultiHeadAttn",
    r"layers\.\d+\.pos_ff": "PositionwiseFF",
    r".*\.layer_norm": nn.LayerNorm,
    "layers|crit.out_layers|word_emb.emb_layers": nn.ModuleList,
    r".*_projs": nn.ParameterList,
    r".*\.CoreNet": nn.Sequential,
    r".*emb_layers\.\d+": nn.Embedding,
    "crit": "ProjectedAdaptiveLogSoftmax",
    "word_emb.lut": nn.Embedding,
}


@contextlib.contextmanager
def stand_ins(folder: Path) -> Iterator[dict[str, dict[str, type[nn.Module]]]]:
    """Importable modules with the code bases' classes, gone afterwards."""
    folder.mkdir(exist_ok=True)
    for name, classes in SOURCES.items():
        lines = [f"class {each}(nn.Module):\n    pass\n" for each in classes.split()]
        (folder / f"{name}.py").write_text("from torch import nn\n\n" + "\n".join(lines))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        found = {name: importlib.import_module(name) for name in SOURCES}
        yield {name: {each: getattr(found[name], each) for each in SOURCES[name].split()} for name in SOURCES}
    finally:
        sys.path.remove(str(folder))
        for name in SOURCES:
            sys.modules.pop(name, None)


def module_of(state: Weights, classes: dict[str, type[nn.Module]]) -> nn.Module:
    """A module with this state dict, of classes by their place in it; equal tensors are one parameter."""

    def part(place: str) -> nn.Module:
        kind = next((kind for pattern, kind in PLACES.items() if re.fullmatch(pattern, place)), nn.Linear)
        made = (classes[kind] if isinstance(kind, str) else kind).__new__(
            classes[kind] if isinstance(kind, str) else kind
        )
        nn.Module.__init__(made)
        return made

    model, parameters = part(""), []
    for name, tensor in state.items():
        *places, own = name.split(".")
        holder = model
        for depth, place in enumerate(places):
            if place not in holder._modules:
                holder.add_module(place, part(".".join(places[: depth + 1])))
            holder = holder._modules[place]
        if own == "inv_freq":
            holder.register_buffer(own, tensor)
            continue
        tied = next((p for p in parameters if p.shape == tensor.shape and torch.equal(p, tensor)), None)
        holder.register_parameter(own, nn.Parameter(tensor) if tied is None else tied)
        parameters.append(holder._parameters[own])
    return model


def kimiyoung_module(
    state: Weights, config: dict[str, Any], classes: dict[str, dict[str, type[nn.Module]]]
) -> nn.Module:
    """Return the model that torch.save(model) of the original's train.py would have been given."""
    model = module_of(state, classes["mem_transformer"] | classes["proj_adaptive_softmax"])
    names = ("n_token", "n_layer", "n_head", "d_model", "d_head", "tgt_len", "mem_len", "ext_len")
    vars(model).update({name: config[name] for name in names})
    vars(model).update(
        attn_type=config.get("attn_type", 0),
        same_length=config.get("same_length", False),
        clamp_len=config.get("clamp_len", -1),
        sample_softmax=-1,
        d_embed=config.get("d_embed") or config["d_model"],
    )
    vars(model.word_emb).update(
        cutoffs=[*config.get("cutoffs", []), config["n_token"]],
        div_val=config.get("div_val", 1),
        emb_scale=config["d_model"] ** 0.5,
    )
    for layer in model.layers:
        vars(layer.dec_attn).update(pre_lnorm=config.get("pre_lnorm", False))
        vars(layer.pos_ff).update(d_inner=config["d_inner"])
        layer.pos_ff.CoreNet.add_module("1", nn.ReLU(inplace=True))
        for norm in (layer.pos_ff.layer_norm, layer.dec_attn.layer_norm):
            norm.eps = 1e-5
    return model


Change = Callable[[nn.Module], object]


def saved(
    folder: Path, name: str, zipped: bool = True, change: Change = lambda model: model, wrapped: bool = False
) -> Path:
    """A kimiyoung case as a whole module, perhaps as a fork has it; its classes are not importable afterwards."""
    with stand_ins(folder / "code") as classes:
        model = kimiyoung_module(*case(name), classes)
        change(model)
        if wrapped:
            parallel = nn.DataParallel.__new__(nn.DataParallel)
            nn.Module.__init__(parallel)
            parallel.add_module("module", model)
            model = parallel
        torch.save(model, folder / "model.pt", _use_new_zipfile_serialization=zipped)
    return folder / "model.pt"


def same_model(one: Imported, other: Imported) -> bool:
    first, second = (check_weights(each.config, each.weights, "model") for each in (one, other))
    return (
        one.config == other.config
        and one.memory_start == other.memory_start
        and one.window_beyond_memory == other.window_beyond_memory
        and one.window_of == other.window_of
        and first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
    )


# ---- kimiyoung, and forks that save whole modules


@pytest.mark.parametrize(
    ("name", "zipped", "wrapped"),
    [
        ("k01_base", True, True),
        ("k02_pre_lnorm", True, False),
        ("k12_not_tied", False, False),
        ("k20_adp_div1", True, False),
        ("k30_adp_div2", False, False),
    ],
)
def test_a_whole_module_is_the_state_with_the_constructor_s_arguments(tmp_path, name, zipped, wrapped):
    state, config = case(f"kimiyoung/{name}")
    found, source = read_checkpoint(saved(tmp_path, f"kimiyoung/{name}", zipped, wrapped=wrapped))
    assert same_model(found, read_checkpoint(state, config=config)[0])
    assert source.container == ("torch zip" if zipped else "torch legacy")
    outermost = "torch.nn.parallel.data_parallel.DataParallel" if wrapped else "mem_transformer.MemTransformerLM"
    assert source.recognised == f"kimiyoung: a pickled module {outermost}"
    assert found.notes == (f"recognised as {source.recognised}",)


def test_what_a_fork_changed_in_its_modules_is_taken_from_them(tmp_path):
    def change(model):
        model.word_emb.emb_scale = 2.0
        for layer in model.layers:
            layer.pos_ff.layer_norm.eps = layer.dec_attn.layer_norm.eps = 1e-3

    config = read_checkpoint(saved(tmp_path, "kimiyoung/k01_base", change=change))[0].config
    assert (config.embedding_scale, config.layer_norm_epsilon) == (2.0, 1e-3)


def test_a_model_with_an_extended_context_runs_without_it_where_that_is_asked_for(tmp_path):
    file = saved(tmp_path, "kimiyoung/k01_base", change=lambda model: setattr(model, "ext_len", 8))
    with pytest.raises(CheckpointError, match=r"ext_len 8, .* give --extended-length 0"):
        prepare(file, ExportOptions(), Silent())
    prepared = prepare(file, ExportOptions(extended_length=0), Silent())
    state, config = case("kimiyoung/k01_base")
    plain = prepare(state, ExportOptions(config=config), Silent())
    assert prepared.builder.dialect == plain.builder.dialect
    assert prepared.provenance["config"] == {"ext_len": 0}  # which verify --checkpoint applies again
    with pytest.raises(UsageError, match="extended_length is 8, expected 0"):
        ExportOptions(extended_length=8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model.layers[0].pos_ff.CoreNet.add_module("1", nn.GELU()), "GELU, expected ReLU"),
        (
            lambda model: setattr(model, "mem_tokens", torch.zeros(2, 1, 16)),
            "a tensor mem_tokens beside its parameters",
        ),
        (lambda model: setattr(model, "num_mem_tokens", 2), "num_mem_tokens 2"),
    ],
)
def test_a_fork_that_computes_something_else_is_refused(tmp_path, change, named):
    with pytest.raises(CheckpointError, match=named):
        read_checkpoint(saved(tmp_path, "kimiyoung/k01_base", change=change))


def test_projections_that_are_no_list_are_read_as_one():
    """LM-RMT registers emb_projs_0 where the original has a list."""
    state, config = case("kimiyoung/k30_adp_div2")
    renamed = {re.sub(r"_projs\.(\d)", r"_projs_\1", name): tensor for name, tensor in state.items()}
    assert renamed.keys() != state.keys()
    plain = read_checkpoint(state, config=config)[0]
    assert same_model(plain, read_checkpoint(renamed, config=config | {"num_mem_tokens": 0})[0])
    with pytest.raises(CheckpointError, match="num_mem_tokens 4"):
        read_checkpoint(renamed, config=config | {"num_mem_tokens": 4})


def test_remixl_s_whole_module_is_not_taken_for_the_original_s(tmp_path):
    state, config = case("extra/x10_remixl")
    with stand_ins(tmp_path / "code") as classes:
        model = module_of(state, classes["modules"] | {"AdaptiveEmbedding": classes["modules"]["Embeddings"]})
        vars(model).update(config | {"is_training": True, "d_head": 8})
        torch.save(model, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"modules\.Embeddings, modules\.MemTransformerLM"):
        read_checkpoint(tmp_path / "model.pt")
    names = [name for name in SOURCES["modules"].split() if name != "Embeddings"]
    aliases = {f"modules.{name}": f"mem_transformer.{name}" for name in names}
    aliases["modules.Embeddings"] = "torch.nn.modules.sparse.Embedding"
    found, source = read_checkpoint(tmp_path / "model.pt", aliases=aliases)
    assert source.recognised == "remixl: a pickled module mem_transformer.MemTransformerLM"
    assert same_model(found, read_checkpoint(state, config=config)[0])


# ---- training checkpoints of the others


def test_remixl_s_training_checkpoint(tmp_path):
    state, config = case("extra/x10_remixl")
    content = {"epoch": 100, "model_setting": config, "train_setting": {"lr": 1e-4}, "state_dict": state}
    torch.save(content | {"best_loss": 0.1, "optimizer": {}}, tmp_path / "ep_100.pth.tar")
    found, source = read_checkpoint(tmp_path / "ep_100.pth.tar")
    assert source.recognised == "remixl: state_dict and model_setting"
    assert same_model(found, read_checkpoint(state, config=config)[0])


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_deepspeed_checkpoint(tmp_path, prefix):
    state, config = case("extra/x01_cntxl_prompt")
    half = {name: tensor.half() for name, tensor in state.items()}
    content = {
        "module": {prefix + name: tensor for name, tensor in half.items()},
        "csr_tensor_module_names": set(),
        "skipped_steps": 3,
        "random_rng_state": random.Random(0).getstate(),
        "np_rng_state": np.random.RandomState(0).get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigNeededError, match="num_layers, vocab_size, hidden_size, num_attention_heads"):
        read_checkpoint(tmp_path / "mp_rank_00_model_states.pt")
    found, source = read_checkpoint(tmp_path / "mp_rank_00_model_states.pt", config=config)
    assert source.recognised.startswith("cntxl: tensors named word_embeddings.weight and ")
    assert same_model(found, read_checkpoint(half, config=config)[0])


class Activation(enum.Enum):
    ReLU = 1
    Swish = 2
    GeLU = 3

    def __reduce_ex__(self, protocol):
        return type(self), (self.value,)


def init_transformer():
    pass


@pytest.fixture
def fastai_names(monkeypatch):
    import types

    for name in ("fastai", "fastai.text", "fastai.text.models", "fastai.text.models.transformer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for thing in (Activation, init_transformer):
        monkeypatch.setattr(thing, "__module__", "fastai.text.models.transformer")
        monkeypatch.setattr(sys.modules["fastai.text.models.transformer"], thing.__name__, thing, raising=False)


@pytest.mark.parametrize(("member", "activation"), [("ReLU", "relu"), ("GeLU", "gelu_tanh")])
@pytest.mark.usefixtures("fastai_names")
def test_fastai_s_checkpoint_names_its_activation_by_a_member_of_an_enum(tmp_path, member, activation):
    state, config = case("extra/x20_fastai_xl")
    config |= {"act": Activation[member], "init": init_transformer, "encode_position": False}
    torch.save({"model": state, "opt": {"state": {}}, "config": config}, tmp_path / "model.pth")
    found, source = read_checkpoint(tmp_path / "model.pth")
    assert source.recognised == "fastai: model and config"
    assert found.config.activation == activation
    assert same_model(found, read_checkpoint(state, config=config | {"act": member})[0])


@pytest.mark.parametrize("value", [2, 7])
@pytest.mark.usefixtures("fastai_names")
def test_fastai_s_other_activations_are_refused(tmp_path, value):
    class Other:
        __module__, __qualname__ = "fastai.text.models.transformer", "Activation"

        def __reduce__(self):
            return Activation, (value,)

    state, config = case("extra/x20_fastai_xl")
    torch.save({"model": state, "config": config | {"act": Other()}}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match="Swish" if value == 2 else "Activation"):
        read_checkpoint(tmp_path / "model.pth")


def test_fastai_s_tied_decoder_and_output_bias_may_be_left_to_the_file():
    state, config = case("extra/x20_fastai_xl")
    plain = read_checkpoint(state, config=config)[0]
    without = {name: value for name, value in config.items() if name != "out_bias"}
    assert same_model(plain, read_checkpoint(state, config=without)[0])
    dropped = {name: tensor for name, tensor in state.items() if name != "1.decoder.weight"}
    assert same_model(plain, read_checkpoint(dropped, config=config)[0])
    with pytest.raises(CheckpointError, match=r"1\.decoder\.weight is missing"):
        read_checkpoint(dropped, config=config | {"tie_weights": False})


def test_fairseq_s_wrapper_of_hugging_face_s_model():
    state, config = case("hf/h12_adp_div2")
    wrapped = {f"decoder.model.{name}": tensor for name, tensor in state.items()}
    found, source = read_checkpoint({"model": wrapped, "args": None}, config=config)
    assert source.recognised == "hf: tensors named transformer.word_emb.emb_layers.0.weight"
    assert same_model(found, read_checkpoint(state, config=config)[0])


# ---- what a config says or leaves out


@pytest.mark.parametrize(
    "name", ["kimiyoung/k01_base", "kimiyoung/k30_adp_div2", "nvidia/n12_adp_div2", "hf/h12_adp_div2"]
)
def test_sampled_softmax_is_noted_and_changes_nothing(name):
    state, config = case(name)
    plain = read_checkpoint(state, config=config)[0]
    found = read_checkpoint(state, config=config | {"sample_softmax": 100})[0]
    assert set(found.notes) - set(plain.notes) == {
        "sample_softmax 100 is for training only: all log-probabilities are computed"
    }
    assert same_model(plain, found)


def test_a_width_of_the_embedding_below_1_is_the_model_s_as_in_train_py():
    state, config = case("kimiyoung/k01_base")
    found = read_checkpoint(state, config=config | {"d_embed": -1})[0]
    assert same_model(found, read_checkpoint(state, config=config)[0])


@pytest.mark.parametrize(
    ("family", "cutoffs"),
    [
        ("kimiyoung/k20_adp_div1", [35, 20, 50]),
        ("kimiyoung/k20_adp_div1", [0, 35, 50]),
        ("nvidia/n10_adp_div1", [20, 20, 50]),
        ("hf/h12_adp_div2", [20, 35, 60]),
    ],
)
def test_cutoffs_have_to_ascend_within_the_vocabulary(family, cutoffs):
    state, config = case(family)
    with pytest.raises(CheckpointError, match=r"do not ascend between 0 and|>= 1"):
        read_checkpoint(state, config=config | {"cutoffs": cutoffs})


def test_hugging_face_ties_all_projections_but_the_first_unless_told():
    state, config = case("hf/h12_adp_div2")
    plain = read_checkpoint(state, config=config)[0]
    del config["tie_projs"]
    assert same_model(plain, read_checkpoint(state, config=config)[0])
    first = {name: tensor for name, tensor in state.items() if name != "crit.out_projs.0"}
    with pytest.raises(CheckpointError, match=r"crit\.out_projs\.0 is missing"):
        read_checkpoint(first, config=config)
    others = {name: tensor for name, tensor in state.items() if not re.match(r"crit\.out_projs\.[1-9]", name)}
    assert same_model(plain, read_checkpoint(others, config=config)[0])
    for untied in ({"proj_share_all_but_first": False}, {"tie_projs": [False]}, {"tie_projs": []}):
        with pytest.raises(CheckpointError, match=r"crit\.out_projs\.1 is missing"):
            read_checkpoint(others, config=config | untied)


# ---- proven again from their own files


OWN = {
    "kimiyoung whole module": ("kimiyoung/k30_adp_div2.model.zip213.pt", "kimiyoung/k01_base.model.zip213.pt"),
    "kimiyoung learned positions": ("kimiyoung/k50_attn1.model.zip213.pt", "kimiyoung/k12_not_tied.model.zip213.pt"),
    "nvidia": ("nvidia/n12_adp_div2.checkpoint_best.pt", "nvidia/n01_base.checkpoint_best.pt"),
    "hf": ("hf/h05_tied_r", "hf/h01_base"),
    "hf safetensors": ("hf/h12_adp_div2.safetensors", "hf/h03_same_length.safetensors"),
}


@pytest.mark.parametrize(("own", "other"), OWN.values(), ids=OWN)
@pytest.mark.slow
def test_a_bundle_is_verified_against_the_file_it_came_from(tmp_path, own, other):
    bundle = tmp_path / "model.txl"
    options: dict[str, Any] = {"segment_length": (4, 1), "memory_length": 6, "same_length": True, "clamp_length": 5}
    txl_export.export(ORACLE / own, bundle, verify=False, **options)
    parity = txl_export.verify(bundle, checkpoint=ORACLE / own, segments=4)
    assert parity.passed
    assert parity.document()["reference"].startswith("the checkpoint")
    with pytest.raises(CheckError, match="verify against the checkpoint it came from"):
        txl_export.verify(bundle, checkpoint=ORACLE / other, segments=1)
