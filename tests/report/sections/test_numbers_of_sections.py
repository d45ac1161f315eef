"""Numbers that sections derive from what was measured, held against the same by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from txl_report.blocks import Figure, Pairs
from txl_report.measuring.results import HeadPicture
from txl_report.sections.attention import attention_section
from txl_report.sections.memory import memory_section
from txl_report.sections.passage import level_of

from tests.report_pages import measures


@pytest.mark.parametrize("length", [8, 20])
def test_where_a_token_looks_most_is_counted_from_its_place_in_the_segment(length: int):
    """Pictures have the last 8 tokens of a segment; each looks 3 tokens back with half of its attention."""
    look = measures(pictures=1).heads
    assert look is not None
    rows, shown, first = 16, 8, length - 8
    values = np.zeros((shown, rows + length), np.uint8)
    for query in range(shown):
        values[query, rows + first + query - 3] = round(255 * math.sqrt(0.5))
    texts = tuple(f"slot {slot}" for slot in range(rows + length))
    look = dataclasses.replace(
        look,
        segment_length=length,
        pictures=(HeadPicture(0, 0, values, 1.0),),
        query_texts=texts[-shown:],
        column_texts=texts,
        column_width=1,
        memory_columns=rows,
    )
    blocks = attention_section("bundle", True, look, "export", "--text FILE").blocks
    (figure,) = (each for each in blocks if isinstance(each, Figure) and each.scale is not None)
    assert [row[:4] for row in figure.table.rows] == [
        (str(first + query), f"slot {rows + first + query}", f"slot {rows + first + query - 3}", "3")
        for query in range(shown)
    ]
    assert {row[4] for row in figure.table.rows} == {"50 %"}
    assert f">{first + shown}<" in figure.chart.drawing  # where the segment ends, on the axis of what looks


@pytest.mark.parametrize(
    ("times", "level"),
    [(1.0, 0), (1.09, 0), (1.11, 1), (2.01, 2), (5.01, 3), (1 / 1.11, -1), (1 / 2.01, -2), (0.19, -3)],
)
def test_tokens_are_marked_by_how_many_times_as_likely_they_became(times: float, level: int):
    assert level_of(math.log(times)) == level


def test_a_model_without_memory_is_not_said_to_have_filled_one():
    found = measures()
    assert found.text is not None
    assert found.heads is not None
    text = dataclasses.replace(found.text, memory_length=0, warm_up=0)
    heads = dataclasses.replace(found.heads, memory_length=0, queries=1, segments=1)
    said = str(memory_section("bundle", text, "a text", "--text FILE").blocks)
    assert "to fill the memory" not in said
    assert "to fill the memory" in str(memory_section("bundle", found.text, "a text", "--text FILE").blocks)
    (pairs, *_) = attention_section("bundle", True, heads, "export", "--text FILE").blocks
    assert isinstance(pairs, Pairs)
    assert pairs.rows[0] == ("Looked at", "1 token in 1 segment")


def test_pieces_that_are_read_side_by_side_each_fill_their_own_memory():
    found = measures().text
    assert found is not None
    text = dataclasses.replace(found, sequences=3, warm_up=8, memory_length=7)
    assert ", after 8 in each of 3 pieces to fill the memory" in str(memory_section("b", text, "t", None).blocks)
