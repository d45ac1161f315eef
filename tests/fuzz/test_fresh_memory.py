"""Graphs that pass the check read nothing that they were not given; a graph that does so is found."""

from __future__ import annotations

import random
import sys

import pytest

from fuzz import odd_nodes
from fuzz.fresh_memory import attack, compared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc alone fills fresh memory on demand")


def test_a_few_random_graphs():
    counts, found = attack(range(600), constants=0.3)
    assert found == []
    assert counts["ran"] >= 60
    assert counts["refused by the check"] >= 60


def test_a_graph_that_reads_behind_its_weights_is_found():
    """Weights of two bits with places are read as if they had four."""

    def reads_on(odd: odd_nodes.Odd) -> bool:
        bits = {entry.name: entry.i for entry in odd.graph.node[0].attribute}.get("bits")
        return bits == 2 and "places" in odd.graph.node[0].input

    odd = [odd_nodes._blocks(random.Random(seed)) for seed in range(3000)]
    kinds = [kind for kind, _ in compared([(each.data(True), each.feeds) for each in odd if reads_on(each)])]
    assert "finding" in kinds
