"""Models of transformers and labml as a user exports them, live against the packages.

The files that a user writes are in tests/own_modules. Live, the package is called by its own arguments, in float64 and
with a memory of its own for each sequence where sequences are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from support import package

LIMIT = 1e-4
SEGMENTS = 200
Named = dict[str, Any]
Own = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any, Named]]
"""The package's call: (tokens, its memory or None) → (logits, its memory, the states by name)."""

GROWTH = {"compressive_labml": "stages"}
"""What "auto" comes to as well: a convolution takes no 0 rows."""


def users(name: str) -> Any:
    """A user's file as a module."""
    package("labml_nn" if name == "compressive_labml" else "transformers")
    return package(f"own_modules.{name}")


def drawn(model: Any, seed: int = 0) -> Any:
    """The model with weights of N(0, 0.2), its norms around 1, so that every part matters."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            values = torch.randn(tensor.shape, generator=draws) * 0.2
            tensor.copy_(1 + values if "norm" in name and name.endswith("weight") else values)
    return model.eval()


def xlnet(model: Any) -> Own:
    def own(tokens: torch.Tensor, memory: Any) -> tuple[torch.Tensor, Any, Named]:
        found = model(tokens, mems=memory, use_mems=True, return_dict=True)
        return found.logits, found.mems, {f"layers.{n:02d}.mem": rows for n, rows in enumerate(found.mems)}

    return own


def rwkv(model: Any) -> Own:
    names = ("ffn_shift", "att_shift", "numerator", "denominator", "maximum")

    def own(tokens: torch.Tensor, memory: Any) -> tuple[torch.Tensor, Any, Named]:
        given = None if memory is None else [state.clone() for state in memory]  # it writes into them
        found = model(tokens, state=given, use_cache=True, return_dict=True)
        return found.logits, found.state, dict(zip(names, found.state, strict=True))

    return own


def rmt(cell: Any) -> Own:
    base, start = cell.model, cell.memory
    rows = len(start)

    def own(tokens: torch.Tensor, memory: Any) -> tuple[torch.Tensor, Any, Named]:
        memory = start[None].repeat(len(tokens), 1, 1) if memory is None else memory
        words = torch.cat([memory, base.transformer.wte(tokens), memory], 1)
        found = base.transformer(inputs_embeds=words).last_hidden_state
        memory = found[:, -rows:]
        return base.lm_head(found[:, rows:-rows]), memory, {"memory": memory}

    return own


def labml(model: Any) -> Own:
    config, layers = model.config, range(model.config["n_layers"])

    def own(tokens: torch.Tensor, memory: Any) -> tuple[torch.Tensor, Any, Named]:
        rows, squeezed = map(list, memory or ([[] for _ in layers], [[] for _ in layers]))  # the memory itself stays
        mem = [torch.stack(part) for part in rows] if rows[0] else []
        old = [torch.stack(part) for part in squeezed] if squeezed[0] else []
        seen = len(rows[0]) + len(squeezed[0]) + torch.arange(len(tokens))
        mask = torch.arange(int(seen[-1]) + 1) <= seen[:, None]
        x, new = model.transformer(model.src_embed(tokens), mem, old, mask[:, :, None])
        for layer in layers:
            rows[layer] = [*rows[layer], *new[layer]]
            while len(rows[layer]) > config["mem_len"]:
                group = torch.stack(rows[layer][: config["compression_rate"]])
                rows[layer] = rows[layer][config["compression_rate"] :]
                squeezed[layer] = [*squeezed[layer], *model.transformer.layers[layer].compress(group)]
            squeezed[layer] = squeezed[layer][-config["c_mem_len"] :]
        states = {f"layers.{n:02d}.mem": torch.stack(part) for n, part in enumerate(rows)}
        states |= {f"layers.{n:02d}.c_mem": torch.stack(part) for n, part in enumerate(squeezed) if part}
        return model.generator(x), (rows, squeezed), states

    return own


def xlnet_model(**options: Any) -> Any:
    made = package("transformers")
    sizes = {"vocab_size": 23, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "attn_type": "uni"}
    return made.XLNetLMHeadModel(made.XLNetConfig(**sizes, dropout=0.0, **options))


def rwkv_model(**options: Any) -> Any:
    made = package("transformers")
    return made.RwkvForCausalLM(made.RwkvConfig(vocab_size=23, hidden_size=16, context_length=32, **options))


def gpt2_cell(rows: int, **options: Any) -> Any:
    made = package("transformers")
    sizes = {"vocab_size": 23, "n_positions": 32, "n_embd": 16, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return users("rmt_gpt2").MemoryCell(made.GPT2LMHeadModel(made.GPT2Config(**sizes, **options)), rows)


def labml_model(**options: int) -> Any:
    sizes = {"n_vocab": 23, "d_model": 16, "heads": 2, "d_ff": 24, "n_layers": 2}
    return users("compressive_labml").Model(sizes | options)


LIVE: Mapping[str, tuple[str, Callable[[], Any], Callable[[Any], Own], tuple[int, ...]]] = {
    "XLNet, same length, part of a segment kept": (
        "xlnet",
        lambda: xlnet_model(mem_len=8, same_length=True, reuse_len=2, ff_activation="relu"),
        xlnet,
        (4,),
    ),
    "XLNet, counted, positions clamped": ("xlnet_counted", lambda: xlnet_model(mem_len=7, clamp_len=4), xlnet, (3, 1)),
    "RWKV, rescaled": ("rwkv", lambda: rwkv_model(num_hidden_layers=4, rescale_every=2), rwkv, (5, 2)),
    "RMT over GPT-2, scaled by layer": (
        "rmt_gpt2",
        lambda: gpt2_cell(5, n_layer=3, scale_attn_by_inverse_layer_idx=True, activation_function="relu"),
        rmt,
        (7, 3),
    ),
    "labml, groups of three": (
        "compressive_labml",
        lambda: labml_model(mem_len=5, c_mem_len=4, compression_rate=3),
        labml,
        (4,),
    ),
}


def test_a_step_that_would_be_another_is_refused_by_the_user_s_file() -> None:
    with pytest.raises(ValueError, match=r"xlnet\.py"):
        users("xlnet_counted").spec(xlnet_model(mem_len=7, same_length=True))


@pytest.mark.slow(keep=0)
@pytest.mark.parametrize("name", LIVE)
def test_the_bundle_goes_with_the_package_over_200_segments(name: str, tmp_path: Path) -> None:
    file, make, call, lengths = LIVE[name]
    module, model = users(file), drawn(make())
    made = txl_export.export(
        module.spec(model),
        tmp_path / "own.txl",
        batch_size=3,
        segment_length=lengths,
        growth=GROWTH.get(file, "auto"),
        verify=False,
    )
    streams = "lockstep" if file in ("xlnet", "compressive_labml") else "independent"
    assert made.manifest.streams == streams
    axis = made.manifest.inputs[0].shape.index("B")
    apart, forgotten = live(made.path, call(model.double()), lengths, axis)
    assert apart <= LIMIT
    assert forgotten > 30 * LIMIT


def live(path: Path, own: Own, lengths: tuple[int, ...], axis: int) -> tuple[float, float]:
    """How far a bundle and the package are apart, and how far the package is from itself without a memory."""
    model, draws = txl_runtime.load(path, backend="cpu"), np.random.default_rng(0)
    stream, batch = model.stream(), model.manifest.batch_size
    alone = model.manifest.streams == "independent"
    memories: list[Any] = [None] * (batch if alone else 1)
    apart = forgotten = 0.0
    for segment in range(SEGMENTS):
        if segment and draws.random() < 0.15:
            row = int(draws.integers(len(memories)))
            stream.reset([row] if alone else None)
            memories[row] = None
        length = int(draws.choice(lengths))
        tokens = draws.integers(0, 23, (length, batch) if axis else (batch, length), np.int32)
        (logits,) = stream.run({"tokens": tokens}).values()
        states = stream.state()
        for row, memory in enumerate(memories):
            rows = slice(row, row + 1) if alone else slice(None)
            given = torch.from_numpy(tokens[:, rows] if axis else tokens[rows]).long()
            with torch.no_grad():
                empty = relative(own(given, None)[0].log_softmax(-1), own(given, memory)[0].log_softmax(-1))
                wanted, memories[row], kept = own(given, memory)
            found = logits[:, rows] if axis else logits[rows]
            if made_logprobs(model):
                wanted = wanted.log_softmax(-1)
            apart, forgotten = max(apart, relative(found, wanted)), max(forgotten, empty)
            apart = max(apart, held(states, kept, rows, model))
    return apart, forgotten


def made_logprobs(model: Any) -> bool:
    return bool(model.manifest.outputs[0].role == "logprobs")


def held(states: Named, kept: Named, rows: slice, model: Any) -> float:
    """How far the states of some sequences are from the package's; of counted ones the newest rows are its."""
    worst = 0.0
    for entry in model.manifest.states:
        if entry.name == "fill":
            continue
        assert entry.batch_axis is not None
        found = np.moveaxis(np.moveaxis(states[entry.name], entry.batch_axis, 0)[rows], 0, entry.batch_axis)
        if entry.name not in kept:
            assert found.size == 0
            continue
        if "fill" in states:
            assert (states["fill"][rows] == len(kept[entry.name])).all()
            found = found[len(found) - len(kept[entry.name]) :]
        worst = max(worst, relative(found, kept[entry.name]))
    return worst


def relative(found: Any, wanted: torch.Tensor) -> float:
    """The largest difference, relative to max(1, the largest value)."""
    exact = wanted.detach().double().numpy()
    assert tuple(found.shape) == exact.shape
    return float(np.abs(np.asarray(found) - exact).max() / max(1.0, np.abs(exact).max()))
