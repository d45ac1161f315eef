"""Packages of transformers with memory as a user exports them, live against the packages.

The files that a user writes are in tests/own_modules. Live, a package's own call goes over 200 segments with the memory
that the package returns, in float64 where it runs in it; resets are at random, of single sequences where sequences are
independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from stand_ins.stateful import infini
from support import package

LIMIT = 1e-4
SEGMENTS, BATCH = 200, 2
STORE = 96
"""Rows of the Memorizing Transformer's store; a segment adds at most four, so a sequence ends before it is full."""
Named = dict[str, Any]
BASE = {"num_tokens": 21, "dim": 16, "depth": 2, "heads": 2}


@dataclass(frozen=True)
class Live:
    """A package's model, and how the package itself is called.

    Attributes:
        name: of the user's file.
        needs: the package.
        kind: its class.
        config: the class's arguments.
        length: L.
        call: (model, inputs, memory or None) → (outputs, memory, states by name).
        more: what the weight file holds beside.
        streams: what the export is to find.
    """

    name: str
    needs: str
    kind: str
    config: Mapping[str, Any]
    length: int
    call: Callable[[Any, Named, Any], tuple[Named, Any, Named]]
    more: Mapping[str, Any] = field(default_factory=dict)
    streams: str = "lockstep"


def compressive(model: Any, inputs: Named, memory: Any) -> tuple[Named, Any, Named]:
    logits, memory, _ = model(inputs["tokens"], memories=memory)
    return {"logits": logits}, memory, {"mem": memory.mem, "compressed_mem": memory.compressed_mem}


def memory_transformer_xl(model: Any, inputs: Named, memory: Any) -> tuple[Named, Any, Named]:
    logits, memory = model(inputs["tokens"], memories=memory)
    return {"logits": logits}, memory, {"short": memory.short, "long": memory.long}


def memformer(model: Any, inputs: Named, memory: Any) -> tuple[Named, Any, Named]:
    found = model(inputs["source"], mems=memory)
    return {"encoded": found.enc_out}, found.mem, {"slots": found.mem}


def feedback(model: Any, inputs: Named, memory: Any) -> tuple[Named, Any, Named]:
    logits, memory = model(inputs["tokens"], memory=memory, return_memory=True)
    return {"logits": logits}, memory, {"keys": memory.keys, "values": memory.values}


def infini_attention(model: Any, inputs: Named, memory: Any) -> tuple[Named, Any, Named]:
    logits, _, memory = model(inputs["tokens"], past_memories=memory, return_new_memories=True)
    states = {f"layers.{n:02d}.kv": one.kv_mem for n, one in enumerate(memory)}
    return {"logits": logits}, memory, states | {f"layers.{n:02d}.norm": one.k_norm for n, one in enumerate(memory)}


LIVE = {
    "memory-transformer-xl": Live(
        "memory_transformer_xl",
        "memory_transformer_xl",
        "MemoryTransformerXL",
        BASE | {"seq_len": 4, "mem_len": 4, "lmem_len": 6, "num_mem_kv": 2},
        4,
        memory_transformer_xl,
    ),
    "memformer": Live(
        "memformer",
        "memformer",
        "Memformer",
        {"dim": 16, "num_memory_slots": 5, "mem_update_attn_heads": 2, "num_mem_updates": 2, "encoder_only": True}
        | {"enc_num_tokens": 21, "enc_depth": 2, "enc_heads": 2, "enc_max_seq_len": 8},
        6,
        memformer,
        streams="independent",
    ),
    "feedback": Live(
        "feedback",
        "feedback_transformer_pytorch",
        "FeedbackTransformer",
        BASE | {"dim_head": 8, "mem_len": 6, "seq_len": 2},
        4,
        feedback,
    ),
    "feedback-one": Live(
        "feedback",
        "feedback_transformer_pytorch",
        "FeedbackTransformer",
        BASE | {"dim_head": 8, "mem_len": 3, "seq_len": 1},
        1,
        feedback,
    ),
    "infini": Live(
        "infini",
        "infini_transformer_pytorch",
        "InfiniTransformer",
        BASE | {"dim_head": 8, "use_mem_delta_rule": True},
        6,
        infini_attention,
    ),
}


def made(live: Live, folder: Path) -> tuple[Any, Path]:
    """The package's model with its own random weights, those that start as one number random too, and their file."""
    torch.manual_seed(0)
    model = getattr(package(live.needs), live.kind)(**live.config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.copy_(parameter.clamp(max=1) + 0.3 * torch.randn(parameter.shape))
    file = folder / "weights.pt"
    torch.save({"config": dict(live.config), "model": model.state_dict(), **live.more}, file)
    return model, file


def exported(live: Live, file: Path, folder: Path) -> Any:
    """The bundle of what a user wrote."""
    spec = package(f"own_modules.{live.name}").build(str(file))
    found = txl_export.export(
        spec, folder / "own.txl", batch_size=BATCH, segment_length=live.length, growth="stages", verify=False
    )
    assert found.manifest.streams == live.streams
    return found


def far(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    wanted = np.asarray(wanted)
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max(initial=0)) / max(1.0, float(np.abs(wanted).max(initial=0)))


def together(parts: Sequence[Any], axis: int) -> Any:
    return torch.cat(list(parts), axis).numpy()


def compare(
    bundle: Path,
    model: Any,
    call: Callable[..., Any],
    clear: Callable[[Any], Any] = lambda memory: None,
    most: int = 60,
) -> float:
    """The largest error of outputs and states over many segments; the model as the package calls it.

    Args:
        bundle: of the model.
        model: of the package.
        call: as `Live.call`.
        clear: what the package begins anew with.
        most: segments between two resets.
    """
    opened = txl_runtime.load(bundle, "cpu")
    manifest, stream, draws = opened.manifest, opened.stream(), np.random.default_rng(5)
    alone = manifest.streams == "independent"
    groups = [[row] for row in range(BATCH)] if alone else [list(range(BATCH))]
    memories: list[Any] = [clear(None) for _ in groups]
    ages, worst, resets = [0] * len(groups), 0.0, 0
    axes = {entry.name: entry.batch_axis for entry in manifest.states}
    for _ in range(SEGMENTS):
        for number, rows in enumerate(groups):
            if draws.random() < 0.04 or ages[number] >= most:
                stream.reset(rows if alone else None)
                memories[number], ages[number], resets = clear(memories[number]), 0, resets + 1
            ages[number] += 1
        drawn = {
            entry.name: draws.integers(0, entry.vocab, (BATCH, manifest.programs[0].segment_length))
            for entry in manifest.inputs
            if entry.vocab is not None
        }
        outputs = stream.run({name: ids.astype(np.int32) for name, ids in drawn.items()})
        theirs = []
        for number, rows in enumerate(groups):
            with torch.no_grad():
                given = {name: torch.from_numpy(ids[rows]) for name, ids in drawn.items()}
                wanted, memories[number], states = call(model, given, memories[number])
            if manifest.logprobs is not None:
                wanted[manifest.logprobs.name] = wanted[manifest.logprobs.name].log_softmax(-1)
            theirs.append((wanted, states))
        ours = stream.state()
        for name in theirs[0][0]:
            worst = max(worst, far(outputs[name], together([wanted[name] for wanted, _ in theirs], 0)))
        for name in theirs[0][1]:
            worst = max(worst, far(ours[name], together([states[name] for _, states in theirs], axes[name] or 0)))
        assert set(theirs[0][1]) <= set(ours)
    assert resets >= 3
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
def test_the_bundle_does_what_the_package_does_over_many_segments(name: str, tmp_path: Path) -> None:
    live = LIVE[name]
    model, file = made(live, tmp_path)
    bundle = exported(live, file, tmp_path).path
    assert compare(bundle, model.double(), live.call) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(("most", "streams"), [(5, "lockstep"), (0, "independent")])
def test_a_store_of_tensors_does_what_the_package_s_own_store_does(most: int, streams: str, tmp_path: Path) -> None:
    config = BASE | {"dim_head": 8, "memorizing_layers": (2,), "num_retrieved_memories": 3, "xl_max_memories": most}
    config |= {"max_knn_memories": STORE}
    needs, kind = "memorizing_transformers_pytorch", "MemorizingTransformer"
    live = Live("memorizing", needs, kind, config, 4, compressive, streams=streams)
    model, file = made(live, tmp_path)
    bundle = exported(live, file, tmp_path).path
    places = (tmp_path / f"stores-{number}" for number in count())

    def clear(memory: Any) -> Any:
        if memory is not None:
            memory[0].clear_memory()
            return memory[0], None
        model.knn_memories_directory = str(next(places))
        stores = model.create_knn_memories(batch_size=BATCH if streams == "lockstep" else 1)
        for searched in (one for store in stores for one in store.knns):
            searched.index.hnsw.efSearch = 4 * STORE  # the package's search is approximate unless it looks at all rows
        return stores, None

    def call(model: Any, inputs: Named, memory: Any) -> tuple[Named, Any, Named]:
        found = model(inputs["tokens"], memory[0], xl_memories=memory[1])
        logits, rows = found if most else (found, [])
        states: Named = {f"xl.{n:02d}.kv": one for n, one in enumerate(rows)}
        for number, store in enumerate(memory[0]):
            states[f"knn.{number:02d}.count"] = torch.from_numpy(store.db_offsets.copy())
        return {"logits": logits}, (memory[0], rows or None), states

    assert compare(bundle, model, call, clear, most=STORE // 4) <= LIMIT


@pytest.mark.slow
def test_infini_attention_with_a_counter_is_the_package_s_and_independent(tmp_path: Path) -> None:
    live = LIVE["infini"]
    model, _ = made(live, tmp_path)
    spec = infini.build(model.state_dict(), live.config)
    found = txl_export.export(spec, tmp_path / "own.txl", batch_size=BATCH, segment_length=live.length, verify=False)
    assert found.manifest.streams == "independent"
    assert len(found.manifest.programs) == 1
    assert compare(found.path, model.double(), live.call) <= LIMIT
