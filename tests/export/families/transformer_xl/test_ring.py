"""The ring step, run as plain PyTorch in float64: the reference's function wherever the head stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from support import small_config
from torch import Tensor
from txl_export.families.transformer_xl import network
from txl_export.families.transformer_xl.folding import fold
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.positions import sinusoid
from txl_export.families.transformer_xl.ring import RingStep, tensor_scatter
from txl_export.families.transformer_xl.softmax import Softmax
from txl_export.families.transformer_xl.step import StepShape
from txl_export.families.transformer_xl.weights import canonical_shapes
from txl_runtime.bundle.tables import ring_slots
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

TOLERANCE = 1e-9  # both sides are float64
BATCH, LENGTH, MEMORY = 3, 4, 7
CASES: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"pre_lnorm": True},
    "pre-norm, final norm": {"pre_lnorm": True, "final_norm": True},
    "window": {"window": 7},
    "window of M + 1": {"window": 8},
    "window shorter than memory": {"window": 3, "pre_lnorm": True},
    "segment window": {"segment_window": True},
    "segment window, clamp": {"segment_window": True, "clamp_length": 3},
    "clamp": {"clamp_length": 4},
    "clamp beyond the memory": {"clamp_length": 40},
    "clamp and window": {"clamp_length": 2, "window": 5},
    "zeros": {"memory_start": "zeros"},
    "zeros, pre-norm": {"memory_start": "zeros", "pre_lnorm": True, "attention_bias": True},
    "zeros, window": {"memory_start": "zeros", "window": 5, "attention_bias": True},
    "single steps": {"single_steps": 4},
    "single steps, longer segments, clamp": {"single_steps": 2, "clamp_length": 3},
    "single steps, segment window, zeros": {"single_steps": 2, "segment_window": True, "memory_start": "zeros"},
    "single steps, memory shorter than a segment": {"single_steps": 4, "memory_length": 2},
    "learned distances": {"attn_type": 1},
    "learned distances, pre-norm": {"attn_type": 1, "pre_lnorm": True},
    "learned distances, window and clamp": {"attn_type": 1, "window": 6, "clamp_length": 5},
    "learned distances, zeros, segment window": {"attn_type": 1, "memory_start": "zeros", "segment_window": True},
    "one row of memory": {"memory_length": 1},
    "memory shorter than a segment": {"memory_length": 3},
    "memory of many segments": {"memory_length": 18},
    "segments of 1": {"length": 1},
    "segments of 1, window, zeros": {"length": 1, "window": 4, "memory_start": "zeros"},
    "segments of 2": {"length": 2},
    "adaptive": {"cutoffs": (20, 40), "div_val": 2},
    "odd heads, biases": {"attention_bias": True, "n_head": 3, "d_head": 5},
    "gelu": {"activation": "gelu"},
}


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 what is in float32 at least; the sinusoids stay those of float32."""
    narrow = Tensor.float
    monkeypatch.setattr(network, "sinusoid", lambda *sizes: sinusoid(*sizes).double())
    monkeypatch.setattr(Tensor, "float", lambda tensor: tensor if tensor.dtype == torch.float64 else narrow(tensor))


class Rings:
    """A ring step, its memory and whoever owns it; beside a reference that runs each stream alone.

    Args:
        heads: where the streams' rings are entered.
        changes: of the config, the dialect, M (`memory_length`) and the longest L (`length`).
    """

    def __init__(self, heads: list[int] | None = None, **changes: Any) -> None:
        dialect = {name: changes.pop(name) for name in Dialect.__struct_fields__ if name in changes}
        self.memory_length = changes.pop("memory_length", MEMORY)
        self.length = changes.pop("length", LENGTH)
        if changes.get("attn_type"):
            changes["position_rows"] = 9
        values = small_config(**changes)
        names = ModelConfig.__struct_fields__
        self.config = msgspec.convert({name: values[name] for name in values if name in names}, ModelConfig)
        self.dialect = Dialect(**dialect)
        draws = torch.Generator().manual_seed(1)
        must, _ = canonical_shapes(self.config)
        state = {name: torch.randn(shape, generator=draws).double() * 0.3 for name, shape in must.items()}
        state = {name: 1 + t * 0.6 if name.endswith("norm.weight") else t for name, t in state.items()}
        self.state, self.folded = state, fold(self.config, state)
        self.reference = PaperModel(self.config, self.dialect, self.memory_length, state, torch.float64)
        shape = StepShape(BATCH, self.length, self.memory_length, "kv")
        self.step = RingStep(self.config, self.dialect, shape, self.folded)
        self.softmax = Softmax(self.config, self.dialect, self.folded)
        self.ring, self.slots = ring_slots(self.memory_length, self.length)
        self.head = torch.tensor(heads or [0] * BATCH, dtype=torch.int32)
        self.truth = [self.reference.initial_memory(1) for _ in range(BATCH)]
        self.fill = torch.full((BATCH,), self.truth[0][0].shape[1], dtype=torch.int32)
        size = (BATCH, self.config.n_head, self.slots, self.config.d_head)
        self.memory = [torch.zeros(size, dtype=torch.float64) for _ in range(2 * self.config.n_layer)]
        if self.dialect.memory_start == "zeros":
            for tensor, start in zip(self.memory, self.projected(self.truth[0]), strict=True):
                tensor[:] = start[:, :1]

    def projected(self, hidden: list[Tensor]) -> list[Tensor]:
        """Keys and values of one stream's hidden memory: [H, rows, d_head] each."""
        return [part[0].transpose(0, 1) for pair in self.reference.keys_and_values(hidden) for part in pair]

    def run(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """One step, and what the owner of the memory does after it; log-probabilities [B, T, V]."""
        valid = torch.tensor(counts, dtype=torch.int32)
        hidden, *self.memory = self.step(tokens, valid, self.fill, self.head, *self.memory)
        self.head, self.fill = self.head + valid, (self.fill + valid).clamp(max=self.memory_length)
        for row in range(BATCH):
            spilled = int(self.head[row]) - self.ring
            if spilled >= 0:
                for tensor in self.memory:
                    tensor[row, :, :spilled] = tensor[row, :, self.ring : self.ring + spilled].clone()
                self.head[row] = spilled
        return self.softmax.logprobs(hidden.flatten(end_dim=1)).reshape(*tokens.shape, -1)

    def rows(self, row: int) -> list[Tensor]:
        """The memory of one stream, oldest row first."""
        slots = torch.arange(int(self.head[row] - self.fill[row]), int(self.head[row])) % self.ring
        return [tensor[row][:, slots] for tensor in self.memory]

    def check(self, tokens: Tensor, counts: list[int]) -> None:
        """One step on both sides; everything that counts is compared."""
        found = self.run(tokens, counts)
        for row, count in enumerate(counts):
            if count:
                expected, self.truth[row] = self.reference(tokens[row : row + 1, :count], self.truth[row])
                torch.testing.assert_close(found[row, :count], expected[0], rtol=0, atol=TOLERANCE)
            assert int(self.fill[row]) == self.truth[row][0].shape[1]
            for ours, theirs in zip(self.rows(row), self.projected(self.truth[row]), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def draw(length: int, seed: int) -> Tensor:
    return torch.randint(0, 60, (BATCH, length), generator=torch.Generator().manual_seed(seed)).int()


def calls(longest: int, laps: int, slots: int) -> Iterator[tuple[Tensor, list[int]]]:
    """Segments of any length, ragged, partial and idle, until every stream has been around often enough."""
    draws, seen, seed = np.random.default_rng(0), np.zeros(BATCH, int), 0
    while seen.min() < laps * slots:
        length = int(draws.integers(1, longest + 1))
        counts = draws.integers(0, length + 1, BATCH)
        if seed % 3 == 0:
            counts[:] = length
        seen += counts
        seed += 1
        yield draw(length, seed), counts.tolist()


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_ring_step_is_the_reference_over_chained_ragged_segments(changes):
    rings = Rings(**changes)
    for tokens, counts in calls(rings.length, 3, rings.ring):
        rings.check(tokens, counts)
    assert int(rings.fill.min()) == rings.memory_length


@pytest.mark.parametrize("length", range(1, LENGTH + 1))
@pytest.mark.parametrize("changes", ["post-norm", "zeros, pre-norm", "clamp and window", "segment window"])
def test_a_ring_may_be_entered_at_every_slot(changes, length):
    """The head of stream i starts i slots further, and every count of every length wraps around at every slot."""
    for first in range(LENGTH + MEMORY):
        rings = Rings([(first + row) % (LENGTH + MEMORY) for row in range(BATCH)], **CASES[changes])
        for seed, missing in enumerate((0, 1, length)):
            rings.check(draw(length, seed), [length, max(0, length - missing), length // 2])
        for seed in range(4):
            rings.check(draw(LENGTH, seed), [LENGTH, seed, LENGTH - seed])


def test_every_head_and_count_meets_a_full_memory():
    rings, met = Rings(), set()
    for tokens, counts in calls(LENGTH, 60, 11):
        met |= {
            (int(head), tokens.shape[1], count)
            for head, fill, count in zip(rings.head, rings.fill, counts, strict=True)
            if fill == MEMORY
        }
        rings.run(tokens, counts)
    every = {
        (head, length, count) for head in range(11) for length in range(1, LENGTH + 1) for count in range(length + 1)
    }
    assert met == every, "otherwise the tests above say less than they seem to"


@pytest.mark.parametrize(
    "changes", [{"window": 6}, {"clamp_length": 3}, {"pre_lnorm": True}, {"memory_length": 6}], ids=str
)
def test_a_ring_of_another_model_is_not_the_reference(changes):
    own = {"window": 7, "clamp_length": 4}
    rings, other = Rings(**own), Rings(**own | changes)
    rings.reference, rings.truth = other.reference, other.truth

    def check_all() -> None:
        for tokens, counts in calls(LENGTH, 3, 11):
            rings.check(tokens, counts)

    with pytest.raises(AssertionError, match=r"not close|assert"):
        check_all()


def test_programs_of_all_lengths_share_a_memory_though_their_own_ring_would_be_shorter():
    """A segment of 1 in the ring of segments of 4 gives what its own ring gives."""
    shared, own = Rings(), Rings(length=1)
    for seed in range(30):
        tokens, counts = draw(1, seed), [1, seed % 2, int(seed % 3 > 0)]
        ours, theirs = (rings.run(tokens, counts) for rings in (shared, own))
        for row, count in enumerate(counts):
            if count:
                torch.testing.assert_close(ours[row], theirs[row], rtol=0, atol=TOLERANCE)
            for a, b in zip(shared.rows(row), own.rows(row), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


# ---- what must not matter


def poisoned(rings: Rings, value: float) -> list[Tensor]:
    """The memory with everything overwritten that holds none."""
    dirty = [tensor.clone() for tensor in rings.memory]
    for row, tensor in itertools.product(range(BATCH), dirty):
        slots = torch.arange(int(rings.head[row] - rings.fill[row]), int(rings.head[row])) % rings.ring
        unused = torch.ones(rings.slots, dtype=torch.bool)
        unused[slots] = False
        tensor[row][:, unused] = value
    return dirty


@pytest.mark.parametrize("value", [1.0, -1e4, 3e4, 1e30, -3e38])
@pytest.mark.parametrize("changes", ["post-norm", "segment window", "learned distances, window and clamp"])
def test_what_stands_in_unused_and_spill_slots_changes_no_bit(changes, value):
    clean, dirty = Rings(**CASES[changes]), Rings(**CASES[changes])
    for tokens, counts in calls(LENGTH, 3, 11):
        dirty.memory = poisoned(dirty, value)
        ours, theirs = dirty.run(tokens, counts), clean.run(tokens, counts)
        for row, count in enumerate(counts):
            assert torch.equal(ours[row, :count], theirs[row, :count])
            assert all(torch.equal(*pair) for pair in zip(dirty.rows(row), clean.rows(row), strict=True))


@pytest.mark.parametrize("token", [-1, 60, 2**31 - 1, -(2**31), 0])
def test_padding_changes_no_bit(token):
    clean, padded = Rings(), Rings()
    for tokens, counts in calls(LENGTH, 3, 11):
        padding = torch.arange(tokens.shape[1]) >= torch.tensor(counts)[:, None]
        ours, theirs = padded.run(torch.where(padding, token, tokens).int(), counts), clean.run(tokens, counts)
        for row, count in enumerate(counts):
            assert torch.equal(ours[row, :count], theirs[row, :count])
            assert all(torch.equal(*pair) for pair in zip(padded.rows(row), clean.rows(row), strict=True))


@pytest.mark.parametrize("idle", [True, False])
def test_a_neighbour_full_of_nan_changes_no_bit(idle):
    clean, ill = Rings(), Rings()
    for tensor in ill.memory:
        tensor[1] = torch.nan
    ill.fill[1] = clean.fill[1] = 3
    for tokens, counts in calls(LENGTH, 2, 11):
        some = [counts[0], 0 if idle else counts[1], counts[2]]
        ours, theirs = ill.run(tokens, some), clean.run(tokens, some)
        for row in (0, 2):
            assert torch.equal(ours[row, : some[row]], theirs[row, : some[row]])
            assert all(torch.equal(*pair) for pair in zip(ill.rows(row), clean.rows(row), strict=True))
    assert not idle or all(tensor[1].isnan().any() for tensor in ill.memory)


# ---- TensorScatter


@pytest.mark.parametrize("write", [[0, 0], [3, 1], [6, 5], [2, 6]])
def test_scattering_is_what_the_standard_says(write):
    draws = np.random.default_rng(0)
    past, update = draws.normal(size=(2, 3, 9, 4)), draws.normal(size=(2, 3, 3, 4))
    found = tensor_scatter(torch.from_numpy(past), torch.from_numpy(update), torch.tensor(write)).numpy()
    expected = past.copy()
    for row, slot in enumerate(write):
        expected[row, :, slot : slot + 3] = update[row]
    assert np.array_equal(found, expected)
    node = onnx.helper.make_node("TensorScatter", ["past", "update", "write"], ["after"], axis=2, mode="linear")
    kinds = {"past": past, "update": update, "after": past}
    values = {name: onnx.helper.make_tensor_value_info(name, 11, array.shape) for name, array in kinds.items()}
    indices = onnx.helper.make_tensor_value_info("write", 7, [2])
    graph = onnx.helper.make_graph([node], "g", [values["past"], values["update"], indices], [values["after"]])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)])
    run = onnx.reference.ReferenceEvaluator(model)
    (theirs,) = run.run(None, {"past": past, "update": update, "write": np.array(write, np.int64)})
    assert np.array_equal(theirs, expected)


def test_scattering_leaves_what_it_was_given():
    past = torch.zeros(1, 1, 5, 2)
    after = tensor_scatter(past, torch.ones(1, 1, 2, 2), torch.tensor([1]))
    assert not past.any()
    assert after[0, 0, :, 0].tolist() == [0, 1, 1, 0, 0]
