"""The chains that are run: every length and operation, until every state was full, and longer for late errors."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from stand_ins.step_stream import ArrayModel, ArrayStream, B, NumpyReference
from txl_export.proof.bits import Bits
from txl_export.proof.chains import LONGER, SEGMENTS, TRIES, Planned, live_sequences, planned, run_chain, settled
from txl_export.proof.side_by_side import Trial
from txl_runtime.listener import Silent
from verified_steps import failing, verified


def test_the_chains_run_every_length_every_operation_and_one_sequence_alone():
    parity = verified()
    assert [chain.chain.name for chain in parity.chains] == [
        "segments of 4",
        "all operations, lengths mixed",
        "segments of 1",
        "one sequence alone",
    ]
    longest, mixed, single, alone = (chain.chain for chain in parity.chains)
    assert (longest.segments, longest.streams, alone.streams) == (40, B, 1)
    assert longest.full_from == 2, "six rows take two segments of four"
    assert single.full_from == 6
    assert mixed.full_from is None
    assert mixed.segments > 40, "segments that were only looked into count as well"
    assert min(mixed.rows) < max(mixed.rows)


def test_each_operation_is_done_to_the_bundle():
    done: set[str] = set()

    class Noting(ArrayStream):
        def __getattribute__(self, name: str) -> Any:
            if name in ("reset", "select", "take", "put", "snapshot", "restore"):
                done.add(name)
            return super().__getattribute__(name)

    verified(Noting)
    assert done == {"reset", "select", "take", "put", "snapshot", "restore"}


class Settling(ArrayStream):
    """A state is off by what its weights were rounded by, and takes some dozen segments to get there."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        off = 1e-3 * (1 - np.exp(-states["count"] / 250))
        return outputs, after | {"h": after["h"] + off[None, :, None].astype(np.float32)}


class Gathering(ArrayStream):
    """A state is off by a little more after every segment."""

    def compute(self, x, states):
        outputs, after = super().compute(x, states)
        return outputs, after | {"h": after["h"] + (1e-6 * states["count"])[None, :, None].astype(np.float32)}


@pytest.mark.parametrize(("stream", "found"), [(Settling, set()), (Gathering, {"drift of h"})])
def test_in_half_precision_an_error_may_settle_and_not_grow_on(stream: type[ArrayStream], found: set[str]):
    parity = verified(stream, segments=40, precision="fp16")
    assert {name for name in failing(parity) if name != "drift of words"} == found
    longest = parity.chains[0].chain
    assert longest.segments == 40 * LONGER**TRIES if found else longest.segments > 40
    assert longest.full_from == longest.segments // LONGER, "judged from where the chain before it ended"
    assert "drift of h" in failing(verified(stream, segments=40)), "in float32 nothing settles"


def test_there_are_two_hundred_segments_however_the_bundle_was_exported():
    manifest = ArrayModel().manifest
    for change in ({}, {"batch_size": 1}, {"streams": "lockstep"}, {"parameters": 10**10}):
        chains = planned(msgspec.structs.replace(manifest, **change), None)
        assert sum(chain.segments for chain in chains) >= SEGMENTS
    assert planned(manifest, 7)[0].segments == 7, "unless fewer are asked for"


@pytest.mark.parametrize(("parameters", "live"), [(100, 3), (10**9, 2), (10**11, 1)])
def test_large_models_have_fewer_sequences_per_segment(parameters, live):
    assert live_sequences(msgspec.structs.replace(ArrayModel().manifest, parameters=parameters)) == live


def test_a_chain_goes_on_until_every_state_was_full_for_as_long_again(tmp_path):
    for most, segments, filling in ((16, 12, ()), (8, 8, ("rows",))):
        planned_chain = Planned("segments of 1", streams=1, lengths=(1,) * 4, most=most)
        trial = Trial(ArrayModel(), NumpyReference(), None, Bits(), tmp_path, Silent())
        chain = run_chain(trial, planned_chain).chain
        assert (chain.segments, chain.full_from, chain.filling) == (segments, 6, filling), "six rows, one by one"


def test_a_longer_chain_comes_with_its_plan_so_that_it_can_be_run_again(tmp_path):
    class Growing(ArrayStream):
        def compute(self, x, states):
            outputs, after = super().compute(x, states)
            return outputs, after | {"h": after["h"] * np.float32(1 + 1e-4 * self.steps)}

    trial = Trial(ArrayModel(Growing, precision="fp16"), NumpyReference(), None, Bits(), tmp_path, Silent())
    first = planned(trial.model.manifest, 40)[0]
    chain, ran = settled(trial, "fp16", first, run_chain(trial, first))
    assert chain.segments == ran.chain.segments == 40 * LONGER**TRIES
    assert ran.chain.full_from == 40 * LONGER ** (TRIES - 1)
    again = run_chain(trial, chain)
    assert len(again.states["h"].tensor.mean) == len(ran.states["h"].tensor.mean)
    assert (again.chain.rows, again.chain.streams) == (ran.chain.rows, ran.chain.streams)
