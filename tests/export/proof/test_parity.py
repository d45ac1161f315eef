"""The document of a verification."""

from __future__ import annotations

import json

import msgspec
from verified_steps import verified


def test_the_document_names_every_output_and_state_with_its_curve():
    document = json.loads(msgspec.json.encode(verified().document()))
    longest = document["chains"][0]
    assert set(longest["outputs"]) == {"words", "mean"}
    assert set(longest["states"]) == {"count", "h", "rows"}
    assert len(longest["states"]["h"]["mean"]) == len(longest["outputs"]["words"]["most"]) == longest["segments"]
    assert longest["states"]["count"]["exact"] is True
    assert document["kl"]["mean"] < 1e-8
    assert document["text"] is None


def test_the_document_counts_errors_divergence_and_ranks_over_all_chains():
    parity = verified()
    document = json.loads(msgspec.json.encode(parity.document()))
    spread, positions = document["spread"], len([value for chain in parity.chains for value in chain.kl])
    assert (spread["ran_on"], len(spread["kl_edges"]) + 1) == ("random inputs", len(spread["kl"]))
    assert {name: found["unit"] for name, found in spread["errors"].items()} == {
        "words": "nats",
        "mean": "relative",
        "all states": "relative",
    }
    assert sum(spread["kl"]) == spread["ranks"]["positions"] == positions
    assert sum(spread["errors"]["words"]["counts"]) % positions == 0, "every column of every position"
    assert len(spread["edges"]) + 1 == len(spread["errors"]["mean"]["counts"])
    assert sum(spread["errors"]["mean"]["counts"][5:]) == 0, "nothing from 1e-5 on"
    assert spread["ranks"]["within"]["1"] > 0.99 * positions
    assert not {"kl", "ranks", "errors"} & set(document["chains"][0])
    assert len(json.dumps(spread)) < 1000
