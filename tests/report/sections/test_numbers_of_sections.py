"""Numbers that sections derive from what was measured, held against the same by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from xml.etree.ElementTree import fromstring

import pytest
from msgspec.structs import replace
from report_pages import measures
from resealing import BASES
from txl_report.blocks import Figure, Pairs
from txl_report.facts.results import verification_of_bundle
from txl_report.measuring.results import Loss, MemoryGain, MemoryLoss, PositionLoss, TextMeasures, TokenGain
from txl_report.schema.verification import LOGPROBS, Chain, Errors, Ranks, Spread, Tensor, Text, Verification
from txl_report.sections.drift import CURVES, MOST_CHAINS, POINTS, curves_of, drift
from txl_report.sections.memory import memory_section, opening_of
from txl_report.sections.passage import level_of, passage_block
from txl_report.sections.sameness import _verification
from txl_runtime.bundle.reading import open_bundle


@pytest.fixture
def verified() -> Verification:
    found = verification_of_bundle(open_bundle(BASES / "transformer_xl"))
    assert isinstance(found, Verification)
    return found


@pytest.mark.parametrize(
    ("times", "level"),
    [(1.0, 0), (1.09, 0), (1.11, 1), (2.01, 2), (5.01, 3), (1 / 1.11, -1), (1 / 2.01, -2), (0.19, -3)],
)
def test_tokens_are_marked_by_how_many_times_as_likely_they_became(times: float, level: int):
    assert level_of(math.log(times)) == level


def test_tokens_whose_bytes_are_one_character_are_one_piece():
    texts = ["a", "\udcc3", "\udca9", "\udce2", "b", "\udce2", "", "\udca0", "ñ"]
    tokens = [TokenGain(place, place, text, 1.0, 2.0) for place, text in enumerate(texts)]
    shown = [piece.text for piece in passage_block(tokens, MemoryGain(9, 0.5, 0.1, 0.5, 0.1)).pieces]
    assert shown == ["a", "é", "\udce2", "b", "\udce2", "", "\udca0", "ñ"]


def test_what_fills_the_memory_is_told_of_each_piece_and_of_no_model_without_one():
    found = measures().text
    assert found is not None
    alone = dataclasses.replace(found, memory_length=0, warm_up=0)
    assert "to fill the memory" not in str(memory_section("b", alone, "t", None).blocks)
    pieces = dataclasses.replace(found, sequences=3, warm_up=8, memory_length=7)
    assert ", after 8 in each of 3 pieces to fill the memory" in str(memory_section("b", pieces, "t", None).blocks)


def test_every_chain_is_drawn_and_named(verified: Verification):
    """8 chains stand 4 each in two charts with the same axes; 3 chains in one."""
    for count, charts in ((3, [3]), (6, [6]), (8, [4, 4]), (13, [5, 5, 3])):
        names = [f"chain {index}" for index in range(count)]
        chains = tuple(replace(verified.chains[0], name=name) for name in names)
        figures = chains_of(replace(verified, chains=chains))
        assert [len(figure.chart.legend) for figure in figures] == charts
        assert [name for figure in figures for _, name in figure.chart.legend] == names
        for figure in figures:
            drawn = [name for _, name in figure.chart.legend]
            (told,) = re.findall("<desc [^>]*>([^<]*)</desc>", figure.chart.drawing)
            assert told.startswith(f"{len(drawn)} of {count} chains: {'; '.join(drawn)}. ")
            assert figure.chart.drawing.count("<polyline") == len(drawn)
        assert len({figure.title for figure in figures}) == len(figures)
        ticks = {tuple(re.findall('class="(?:up|across)"[^>]*>([^<]*)<', figure.chart.drawing)) for figure in figures}
        assert len(ticks) == 1


def test_a_strangers_thousand_chains_are_not_all_drawn_and_that_is_told(verified: Verification):
    chains = tuple(replace(verified.chains[0], name=f"chain {index}") for index in range(500))
    figures = chains_of(replace(verified, chains=chains))
    assert sum(len(figure.chart.legend) for figure in figures) == MOST_CHAINS
    assert "6 of 400 chains: " in figures[0].chart.drawing


def test_every_output_of_a_chain_has_its_curve_and_of_the_states_the_furthest(verified: Verification):
    """A step may have more outputs than one chart can tell apart; what is compared exactly has no curve."""
    tensor = Tensor(largest=1.0, mean=[0.5, 1.0], most=[1.0, 1.0])
    outputs = {f"y{index}": tensor for index in range(CURVES)} | {"count": Tensor(exact=True, most=[0.0, 0.0])}
    states = {"a": tensor, "b": replace(tensor, largest=None), "c": Tensor(exact=True, largest=None)}
    chain = replace(verified.chains[0], outputs=outputs, states=states)
    said = [*(f"output y{index}" for index in range(CURVES)), "state b"]
    assert [curve.name for curve in curves_of(chain)] == said
    blocks = drift("export", replace(verified, chains=(chain,)))
    assert [name for block in blocks for _, name in block.chart.legend] == [f"{name}, largest" for name in said]
    assert len(curves_of(replace(chain, outputs=outputs | {f"z{index}": tensor for index in range(9)}))) == CURVES + 1


def test_a_transformer_xl_is_drawn_by_its_log_probabilities(verified: Verification):
    """As they are in both forms of a chain; the memory has no limit in nats to be drawn below."""
    older = verified.chains[0]
    memory = Tensor(largest=1e-6, mean=[1e-7, 1e-6], most=[1e-6, 1e-6])
    chains = [older, replace(older, states={"memory": memory})]
    one, other = (drift("export", replace(verified, chains=(chain,))) for chain in chains)
    assert one == other
    (figure,) = one
    assert [name for _, name in figure.chart.legend] == ["largest of a segment", "mean of a segment"]
    assert "limit 1" in figure.chart.drawing


def test_long_curves_become_short_ones():
    many = 2 * POINTS + 1
    tensor = Tensor(nats=True, mean=[1.0, 3.0] * POINTS + [7.0], most=[*map(float, range(many))])
    (curve,) = curves_of(Chain("long", 1, many, many, outputs={LOGPROBS: tensor}))
    assert curve.unit == "nats"
    assert curve.segments == 3
    assert len(curve.mean) == len(curve.most) == -(-many // 3) <= POINTS
    assert curve.most[:3] == (2, 5, 8)
    assert curve.mean[0] == pytest.approx(5 / 3)


def test_what_a_segment_lacks_a_point_lacks():
    tensor = Tensor(most=[1.0, None, 3.0], mean=[1.0, 2.0, 3.0])
    (curve,) = curves_of(Chain("short", 1, 3, 3, outputs={"y": tensor}))
    assert (curve.segments, curve.most, curve.mean) == (1, (1.0, None, 3.0), (1.0, 2.0, 3.0))


def test_errors_are_one_line_and_where_a_gate_failed_decades_and_ranks_by_shares(verified: Verification):
    edges, kl_edges = (tuple(10.0**power for power in range(first, 1)) for first in (-9, -15))
    ranks = Ranks(40, {"10": 40, "1": 38, "2": 39}, 10, 399)
    text = Text(tokens=9, reference_nll=2.0, runtime_nll=2.1, relative=0.1, errors=(8, *[0] * 10))
    spread = Spread("random tokens", edges, {"y": Errors("nats", tuple(range(11)))}, kl_edges, (40, *[0] * 16), ranks)
    (line,) = (
        block.text
        for block in _verification("export", replace(verified, spread=spread, text=text))
        if block.kind == "paragraph" and "largest errors" in block.text
    )
    assert line == (
        "The largest errors: y ≥ 1 nats, KL divergence < 10⁻¹⁵ nats, tokens of the text < 10⁻⁹ nats. "
        "The best token is the same at 95.0 % of positions."
    )
    blocks = _verification("export", replace(verified, spread=spread, text=text, passed=False))
    headings = [block.text if block.kind == "heading" else "" for block in blocks]
    start = headings.index("How errors are spread") + 1
    errors = blocks[start : start + 3]
    assert [block.caption.split(" by ")[0] for block in errors] == [
        f"Errors of {name}" for name in ("y", "KL divergence", "tokens of the text")
    ]
    assert errors[0].rows[0] == ("10⁻⁹ … 10⁻⁸", "1", "1.8 %")
    assert errors[0].rows[-1][:2] == ("≥ 1", "10")
    assert [row[0] for row in errors[1].rows] == ["< 10⁻¹⁵"], "decades without a value are left out"
    (ranked,) = (block for block in blocks if block.kind == "table" and "best token is among" in block.caption)
    assert [row[0] for row in ranked.rows[:3]] == ["the first", "the first 2", "the first 10"]
    assert [row[1] for row in ranked.rows] == ["95.0 %", "97.5 %", "100 %", "99.750 %"]


def test_tables_of_any_length_are_cut(verified: Verification):
    many = {f"layers.{index:04d}": float(index) for index in range(3000)}
    figure = _verification("export", replace(verified, sensitivity=many))[-1]
    assert isinstance(figure, Figure)
    assert figure.table.rows[0] == ("layers.2999", "2,999")
    assert len(figure.table.rows) == 400


def test_the_perplexity_of_a_verification_says_that_it_is_of_other_tokens(verified: Verification):
    """It is read from the start of the text with an empty memory; nobody should hold it against the first screen's."""

    def told(text: Text) -> str:
        found = replace(verified, text=text)
        rows = [row for block in _verification("export", found) if isinstance(block, Pairs) for row in block.rows]
        return dict(rows)["Text"]

    text = Text(tokens=16_385, reference_nll=1.5, runtime_nll=1.5, relative=0.0)
    assert told(text).startswith("its first 16,385 tokens, predicted from an empty memory on. ")
    assert "“What memory does” counts only tokens that a full memory predicts, and txl-deploy score all" in told(text)
    assert told(replace(text, behind=1_600)).startswith(
        "its first 16,385 tokens behind the 1,600 that int4 is fitted to"
    )


@pytest.mark.parametrize("error", [0.1, None])
def test_the_curve_without_memory_stands_beside_the_one_with_it(error: float | None):
    found = measures().text
    assert found is not None
    much, little = Loss(100, math.log(8), error, 8.0), Loss(100, math.log(4), error, 4.0)
    positions = tuple(PositionLoss(at, at, little, much) for at in range(12))
    (figure, *_) = charts_of(dataclasses.replace(found, by_position=positions, of_bytes=False))
    assert [name for _, name in figure.chart.legend] == ["with the whole memory", "with no memory"]
    assert "with the whole memory from 4.00 to 4.00, with no memory from 8.00 to 8.00" in figure.chart.drawing
    spread = "–" if error is None else "0.10"
    assert figure.table.rows[0] == ("0", "100", "1.3863", spread, "4.00", "2.0794", spread, "8.00")
    assert figure.chart.drawing.count('class="band') == (0 if error is None else 2)
    assert ("± one standard error" in figure.note) == (error is not None)
    (figure, *_) = charts_of(dataclasses.replace(found, by_position=positions, of_bytes=True))
    assert "with the whole memory from 2.00 to 2.00, with no memory from 3.00 to 3.00" in figure.chart.drawing
    assert figure.chart.up == "bits per byte"
    alone = tuple(PositionLoss(at, at, little) for at in range(12))
    (figure, *_) = charts_of(dataclasses.replace(found, by_position=alone))
    assert figure.chart.legend == ()
    assert "no second curve" in figure.note


def test_perplexities_by_memory_length_have_bars_of_their_errors():
    found = measures().text
    assert found is not None
    lengths = tuple(MemoryLoss(rows, Loss(100, math.log(5 - rows / 8), 0.1, 0), 0.1, 0.01) for rows in (0, 2, 4, 8))
    (_, figure) = charts_of(dataclasses.replace(found, by_memory=lengths, of_bytes=False))
    drawing = fromstring(figure.chart.drawing)
    bars = [line.attrib for line in drawing.iter("line") if line.attrib["class"] == "spread s1"]
    ticks = re.findall('class="up"[^>]*>([^<]*)<', figure.chart.drawing)
    low, high = float(figure.chart.up.split("begins at ")[1].partition(",")[0]), max(map(float, ticks))
    assert [100 - float(bars[0][end].rstrip("%")) for end in ("y1", "y2")] == pytest.approx(
        [100 * (5 * math.exp(by) - low) / (high - low) for by in (-0.1, 0.1)], abs=0.1
    )
    assert len(bars) == 4
    assert "bar at each point is ± one standard error" in figure.note


def charts_of(found: TextMeasures) -> list[Figure]:
    """Return a page's charts of losses: the one that it opens with, if it has one, and those of the section."""
    opening = opening_of(found)
    blocks = memory_section("bundle", found, "a text", "--text FILE").blocks
    return [*([opening.figure] if opening else []), *(block for block in blocks if isinstance(block, Figure))]


def chains_of(found: Verification) -> list[Figure]:
    return [block for block in drift("export", found) if block.title.startswith("Chains side by side")]
