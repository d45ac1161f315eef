"""Show the model: architecture, shapes, parameters, bytes of each part, tables."""

from __future__ import annotations

from txl_report.blocks import Block, Cell, Code, Figure, Heading, Pairs, Paragraph, Section
from txl_report.charts.bars import Bar, named_bars
from txl_report.facts.byte_shares import ByteShares
from txl_report.facts.gathering import Facts
from txl_report.facts.model import LENGTHS, STREAMS, Context, family_of, memory_rows
from txl_report.facts.plain import some
from txl_report.facts.tables import Tables
from txl_report.numbers import NONE, counted, quantity, share, size, whole
from txl_report.sections.common import gap, table, titled


def model_section(facts: Facts) -> Section:
    """Show the facts about the model that are known without running it."""
    blocks: list[Block] = [Pairs(_rows(facts))]
    if isinstance(facts.parts, ByteShares):
        blocks.append(_parts(facts.parts))
    else:
        blocks.append(gap("Bytes by part", facts.parts))
    blocks += [Heading("What a step reads, returns and carries"), *_tables(facts.tables)]
    return Section("model", "The model", "What this bundle computes, and how large it is.", blocks)


def _rows(facts: Facts) -> list[tuple[str, Cell]]:
    model, context, memory = facts.manifest, facts.context, memory_rows(facts.manifest)
    reads = f"{whole(model.vocab_size)} token ids" if model.vocab_size else "no token ids"
    text = ", with a vocabulary to read and write text" if model.vocabulary is not None else ", without a vocabulary"
    short, exact = quantity(model.parameters), whole(model.parameters)
    rows: list[tuple[str, Cell]] = [
        ("Model", Code(model.model_id)),
        ("Kind", family_of(model)),
        *((titled(name), text) for name, text in facts.described),
        ("Parameters", exact if short == exact else f"{short} ({exact})"),
        ("Precision", model.precision),
        ("Segment length L", ", ".join(map(whole, some(model.segment_lengths)))),
        ("Memory length M", "not counted in rows" if memory is None else whole(memory)),
        ("Sequences B", ", ".join(map(whole, some((model.batch_size, *model.batch_sizes))))),
        ("State", f"{size(model.state_bytes)} per sequence"),
        ("Sequences are", STREAMS[model.streams]),
        ("Lengths", LENGTHS[model.lengths]),
        ("Reads", reads + (text if model.vocab_size else "")),
        ("Boundary token", NONE if model.boundary_token is None else whole(model.boundary_token)),
    ]
    if isinstance(context, Context):
        rows.append(("Theoretical context", f"{counted(context.tokens, 'token')} ({context.formula})"))
    else:
        rows.append(("Theoretical context", context.reason))
    return rows


def _parts(parts: ByteShares) -> Figure:
    bars = [Bar(part.name, part.bytes, size(part.bytes)) for part in parts.parts]
    largest = max(parts.parts, key=lambda part: part.bytes, default=None)
    seen = f"The largest part is {largest.name} with {size(largest.bytes)}." if largest else "There is no tensor."
    rows = [
        (part.name, whole(part.tensors), whole(part.bytes), share(part.bytes / parts.bytes if parts.bytes else 0.0))
        for part in parts.parts
    ]
    return Figure(
        f"Bytes by part, {size(parts.bytes)} in all",
        named_bars("parts", "Bytes by part of the model", seen, bars),
        table("Bytes by part of the weight file", ("Part", "Tensors", "Bytes", "Share"), (1, 2, 3), rows),
        parts.note,
    )


def _tables(tables: Tables) -> list[Block]:
    reads = [(*row[:4], f"+ {row.lookahead}" if row.lookahead else NONE) for row in tables.reads]
    returns = [row[:4] for row in tables.returns]
    programs = [
        (row.name, row.kind, whole(row.segment_length) if row.segment_length else NONE, row.update, row.file)
        for row in tables.programs
    ]
    return [
        Paragraph("B is the number of sequences, L the length of a segment.", quiet=True),
        table("A step reads", ("Name", "Type", "Shape", "Role", "Look-ahead"), (), reads, folded=True),
        table("A step returns", ("Name", "Type", "Shape", "Role"), (), returns, folded=True),
        table("A step carries", ("Name", "Type", "Shape", "Update", "Starts as"), (), tables.carries, folded=True),
        table("Programs: one graph each", ("Name", "Kind", "L", "Update", "File"), (2,), programs, folded=True),
    ]
