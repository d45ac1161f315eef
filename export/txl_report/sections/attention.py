"""Where the heads look: maps of chosen heads, mean distances, and how attention spreads over distances."""

from __future__ import annotations

import numpy as np

from txl_report.blocks import Block, Cell, Figure, Gap, Heading, Pairs, Paragraph, Picture, Section, Shade
from txl_report.charts.heat import heat_map, legend_address, map_address
from txl_report.charts.lines import Series, line_chart
from txl_report.charts.scales import Scale, linear_scale, shifted_scale, thinned
from txl_report.facts.plain import Missing
from txl_report.measuring.results import DistanceBin, HeadFacts, HeadPicture, HeadsLook
from txl_report.numbers import counted, fixed, number, share, whole
from txl_report.schema.reading import short
from txl_report.sections.common import gap, report_command, table
from txl_report.visible import as_one_line

LARGE = 2
"""Heads that are shown as large maps: the one that looks furthest and the one that looks nearest."""
SHADES = 5
FINE = 8
ROWS, LONGEST = 12, 5
"""Rows of a large map that have their token beside them, and characters of it."""


def attention_section(
    name: str, has_program: bool, found: HeadsLook | Missing | None, export: str | None, option: str | None
) -> Section:
    """What was seen; `export` is the command that adds the program, `option` gives a report its text."""
    blocks: list[Block]
    if export is None or option is None:
        blocks = [Gap("Attention", "Only a Transformer-XL's bundle can have a program that shows attention.")]
    elif not has_program:
        why = (
            "The bundle has no program that returns attention probabilities, so nobody can look. Export the model "
            "again with --attention; it adds a file and makes nothing slower."
        )
        blocks = [Gap("Attention", why, (export,))]
    elif found is None:
        why = "The bundle can show its attention, but no text was given to look at."
        blocks = [Gap("Attention", why, (report_command(name, option),))]
    elif isinstance(found, Missing):
        blocks = [gap("Attention", found)]
    else:
        blocks = _seen(found)
    return Section(
        "attention",
        "Where the heads look",
        "Attention over the memory and the segment: who looks where, how far, and how evenly.",
        blocks,
    )


def _looked_at(found: HeadsLook) -> str:
    full = ", memory full" if found.memory_length else ""
    return f"{counted(found.queries, 'token')} in {counted(found.segments, 'segment')}{full}"


def _seen(found: HeadsLook) -> list[Block]:
    facts, pictures = found.facts, found.pictures
    heads = counted(found.layers * found.heads, "head")
    far_back = f"{counted(found.segment_length, 'token')} back (a segment) or further"
    distances = {(f.layer, f.head): (f.distance, number(f.distance)) for f in facts}
    beyond = {(f.layer, f.head): (f.beyond_share, share(f.beyond_share)) for f in facts}
    near, far = facts[0], facts[-1]
    blocks: list[Block] = [
        Pairs(
            [
                ("Looked at", _looked_at(found)),
                (
                    "Look beyond a segment",
                    f"In {found.beyond or 'none'} of {heads} a tenth of attention or more goes {far_back}",
                ),
                ("Do so on average", f"In {found.mean_beyond or 'none'} of {heads} the mean distance is that long"),
                ("Nearest", f"{_head(near)}: {number(near.distance)} tokens back on average"),
                ("Furthest", f"{_head(far)}: {number(far.distance)} tokens back on average"),
            ]
        ),
        *(Paragraph(note, quiet=True) for note in pictures.notes),
        Heading("How far back, head by head"),
        _grid("How many tokens back each head looks on average", found, distances),
        _grid(f"Share of each head's attention that goes {far_back}", found, beyond),
        _every(facts),
        _spread(found),
    ]
    if pictures.heads:
        by_head = {(picture.layer, picture.head): picture for picture in pictures.heads}
        shown = [fact for fact in facts if (fact.layer, fact.head) in by_head]
        chosen = [*shown[-1:], *shown[:1]][: min(LARGE, len(shown))]
        chosen = chosen[:1] if len(shown) == 1 else chosen
        blocks += [Heading("Who looks where"), _small(found)]
        blocks += [_large(index, found, by_head[fact.layer, fact.head], fact) for index, fact in enumerate(chosen)]
    return blocks


def _grid(caption: str, found: HeadsLook, values: dict[tuple[int, int], tuple[float, str]]) -> Block:
    """Layers as rows, heads as columns; a darker cell is a larger number."""
    most = max((value for value, _ in values.values()), default=0.0) or 1.0
    rows: list[list[Cell]] = []
    for layer in range(found.layers):
        cells: list[Cell] = [f"Layer {layer + 1}"]
        for head in range(found.heads):
            value, written = values.get((layer, head), (0.0, number(None)))
            cells.append(Shade(written, round(SHADES * value / most)))
        rows.append(cells)
    names = ("Layer", *(f"Head {head + 1}" for head in range(found.heads)))
    return table(caption, names, range(1, found.heads + 1), rows)


def _every(facts: tuple[HeadFacts, ...]) -> Block:
    rows = [
        (
            _head(fact),
            number(fact.distance),
            number(fact.error, 2),
            share(fact.memory_share),
            share(fact.beyond_share),
            whole(fact.reach),
            number(fact.looks_at),
        )
        for fact in facts
    ]
    names = ("Head", "Mean distance", "±", "To memory", "Beyond a segment", "90 % within", "Looks at about … tokens")
    caption = "Every head, the nearest first; distances in tokens, ± is one standard error"
    return table(caption, names, range(1, 7), rows, folded=True)


def _spread(found: HeadsLook) -> Figure:
    facts, shares, bins = found.facts, found.distance_shares, found.distance_bins
    chosen = [("nearest head", facts[0]), ("furthest head", facts[-1])]
    curves = [(f"{said} ({_head(f)})", shares[f.layer, f.head]) for said, f in chosen]
    curves.insert(0, ("mean of all heads", shares.mean(axis=(0, 1))))
    series = [
        Series(said, [(index, float(value) * 100) for index, value in enumerate(curve)], [_bin(each) for each in bins])
        for said, curve in curves
    ]
    rows = [(_bin(each), *(share(float(curve[index])) for _, curve in curves)) for index, each in enumerate(bins)]
    every = max(1, -(-len(bins) // 6))
    ticks = tuple((float(index), whole(bins[index].first)) for index in range(0, len(bins), every))
    across = Scale(0, max(len(bins) - 1, 1), ticks)
    return Figure(
        "Attention by distance",
        line_chart(
            "distances",
            "Share of attention by distance",
            f"{len(bins)} bins of distances that become wider, up to {bins[-1].last} tokens back.",
            series,
            across,
            linear_scale([y for each in series for _, y in each.points], zero=True),
            across_label="tokens back, in bins that become wider",
            up_label="share of attention, %",
        ),
        table("Share of attention by distance", ("Tokens back", *(said for said, _ in curves)), range(4), rows),
        "A head that looks at the tokens just before is high at the left, one that looks far back at the right.",
    )


def _head(fact: HeadFacts) -> str:
    return f"layer {fact.layer + 1}, head {fact.head + 1}"


def _bin(each: DistanceBin) -> str:
    return whole(each.first) if each.first == each.last else f"{whole(each.first)} … {whole(each.last)}"


def _large(index: int, found: HeadsLook, picture: HeadPicture, fact: HeadFacts) -> Figure:
    """One head with axes, and the token that each query looks at most."""
    title = f"Layer {picture.layer + 1}, head {picture.head + 1}: {number(fact.distance)} tokens back on average"
    queries, columns = picture.values.shape
    shown, width = found.pictures, found.pictures.column_width
    memory = shown.memory_columns * width
    first = found.segment_length - queries  # of a long segment, pictures have the last queries
    slots = columns * width
    rows = []
    for query in range(queries):
        best = int(np.argmax(picture.values[query]))
        value = (float(picture.values[query, best]) / 255) ** 2 * picture.largest
        text = shown.query_texts[query] if query < len(shown.query_texts) else ""
        looked = shown.column_texts[best] if best < len(shown.column_texts) else ""
        back = memory + first + query - best * width
        rows.append((whole(first + query), text, looked, whole(max(back, 0)), share(value)))
    names = [short(as_one_line(text).replace(" ", "␣"), LONGEST) for text in shown.query_texts] + [""] * queries
    labelled = thinned(queries, ROWS)
    up = Scale(0, queries, tuple((queries - q - 0.5, f"{names[q]} {whole(first + q)}".strip()) for q in labelled))
    return Figure(
        title,
        heat_map(
            f"head-{index}",
            title,
            f"{share(fact.memory_share)} of its attention goes to memory, {share(fact.beyond_share)} a segment back or "
            f"further; it looks at about {number(fact.looks_at)} tokens.",
            picture.values,
            shifted_scale(0, slots, memory),
            up,
            across_label="token that is looked at: left of the dashed line in the memory, right of it in the segment",
            up_label="token that looks and its position in the segment, from the first one down",
            divider=float(memory),
        ),
        table(
            "The column that each token looks at most",
            ("Position", "Token", "Looks most at", "Tokens back", "Share of its attention"),
            (0, 3, 4),
            rows,
        ),
        "Each row is a token that looks back. Along the row, colour says how much of its attention goes where.",
        scale=(legend_address(), "0", share(picture.largest)),
    )


def _small(found: HeadsLook) -> Block:
    """All pictures, a layer in each row."""
    pictures, facts = found.pictures.heads, {(fact.layer, fact.head): fact for fact in found.facts}
    layers = sorted({picture.layer for picture in pictures})
    most = max(sum(picture.layer == layer for picture in pictures) for layer in layers)
    rows: list[list[Cell]] = []
    for layer in layers:
        cells: list[Cell] = [f"Layer {layer + 1}"]
        for picture in pictures:
            if picture.layer == layer:
                fact = facts[layer, picture.head]
                words = as_one_line(
                    f"Layer {layer + 1}, head {picture.head + 1}: {fixed(fact.distance, 1)} tokens back on average, "
                    f"{share(fact.memory_share)} to memory"
                )
                below = f"{picture.head + 1}: {number(fact.distance)} back"
                cells.append(Picture(map_address(picture.values, fine=FINE), words, below))
        rows.append([*cells, *[""] * (most + 1 - len(cells))])
    caption = "A map of each head: tokens that look from top to bottom, what they look at from left to right"
    return table(
        caption, ("Layer", *[f"Head {n + 1}" if most == found.heads else "Head" for n in range(most)]), (), rows
    )
