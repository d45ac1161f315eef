"""Inputs that are drawn for a foreign graph: by its tables, by what it compares, and by names."""

from __future__ import annotations

import foreign_graphs as graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from foreign_graphs import STATEFUL, Case, exported, step
from torch import nn
from txl_export.families.graph.find import trying
from txl_export.families.graph.find.structure import read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.take.reading import read_foreign
from txl_export.families.graph.take.running import RunError


@pytest.fixture
def inputs_of(tmp_path):
    def make(data: bytes) -> Inputs:
        (tmp_path / "graph.onnx").write_bytes(data)
        foreign = read_foreign(tmp_path / "graph.onnx")
        return Inputs(foreign, read_structure(ir.to_proto(foreign.model), foreign.inputs))

    return make


def test_a_setting_is_what_the_graph_compares_it_with(inputs_of):
    inputs = inputs_of(graphs.branched())
    assert inputs.draw(0, dict.fromkeys(inputs.roles, 2))["rate"] == 16000


def test_indices_masks_places_and_lengths_are_what_they_are_called(inputs_of):
    def run(self, ids, attention_mask, position_ids, place_pos, lengths, done):
        rows = self.e(ids) * attention_mask[..., None] + position_ids[..., None] + place_pos + lengths[:, None, None]
        return rows * (1 - done.to(rows.dtype))[:, None, None]

    whole = torch.zeros(2, 3, dtype=torch.int64)
    given = {
        "ids": whole,
        "attention_mask": whole,
        "position_ids": whole,
        "place_pos": torch.tensor(0),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "done": torch.zeros(2, dtype=torch.bool),
    }
    free = {"ids": {1: "seq"}, "attention_mask": {1: "seq"}, "position_ids": {1: "seq"}}
    case = Case(step(run, e=lambda: nn.Embedding(5, 4)), given, ("y",), {}, free)
    inputs = inputs_of(exported(case)[0])
    drawn = inputs.draw(0, {"seq": 50})
    assert sorted(set(drawn["ids"].ravel().tolist())) == [0, 1, 2, 3, 4]
    assert drawn["attention_mask"].all()
    assert drawn["position_ids"].tolist() == [list(range(50))] * 2
    assert drawn["place_pos"].shape == ()
    assert drawn["lengths"].tolist() == [50, 50]
    assert not drawn["done"].any()
    inputs.structure.branching.add("done")  # as "use_cache_branch" of decoders, whose cache is in the branch of true
    assert inputs.draw(0, {"seq": 50})["done"].all()


def test_a_seed_gives_the_same_numbers_and_another_one_others(inputs_of):
    inputs = inputs_of(exported(STATEFUL["gru cell"])[0])
    first, again, other = (inputs.draw(seed, {"batch": 3}) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


def test_symbols_are_sequences_positions_or_rows_by_their_names(inputs_of):
    assert inputs_of(exported(STATEFUL["growing caches and a mask"])[0]).roles == {
        "batch": "batch",
        "sequence_length": "segment",
        "total_sequence_length": "total",
        "past_sequence_length": "rows",
    }


def test_symbols_that_an_exporter_made_up_are_sequences_in_a_state_and_at_the_front(inputs_of):
    case = STATEFUL["lstm"]
    free = {"x": [0, 1], "h": [1], "c": [1], "y": [0, 1], "hn": [1], "cn": [1]}
    roles = inputs_of(exported(Case(case.make, case.given, case.returned, {}, free))[0]).roles  # type: ignore[arg-type]
    assert {symbol.partition("_dynamic")[0]: role for symbol, role in roles.items() if role == "batch"} == {
        "x": "batch",
        "h": "batch",
        "c": "batch",
    }
    assert len(roles) == 4


def test_more_numbers_than_anybody_needs_are_not_drawn(inputs_of, monkeypatch):
    inputs = inputs_of(exported(STATEFUL["gru cell"])[0])
    monkeypatch.setattr(trying, "MOST_NUMBERS", 20)
    with pytest.raises(RunError, match="takes 28 numbers, of which at most 20"):
        inputs.draw(0, {"batch": 2})


def test_an_array_of_none_is_as_large_as_numpy_counts_it(inputs_of):
    case = STATEFUL["gru cell"]
    free = {"x": {0: "rows", 1: "width"}}
    inputs = inputs_of(exported(Case(case.make, case.given, case.returned, {}, free))[0])
    with pytest.raises(RunError, match="of which at most"):
        inputs.draw(0, {"rows": 0, "width": 2**62})
