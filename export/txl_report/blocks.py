"""Define the parts of a page: sections, which consist of a few kinds of blocks, as plain values without markup.

A section's module decides the content; the files in `templates/` decide the look of each kind of block. Every text in a
block may come from a stranger, so the templates pass every text through one filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from txl_report.charts.figure import Chart

State = Literal["passed", "failed", "none"]
"""Verdict that a badge shows, which decides its sign and style; "none" if nothing was judged."""


@dataclass(frozen=True)
class Badge:
    """A sign and its words, so that a verdict is never shown only by colour."""

    state: State
    text: str
    kind: ClassVar[str] = "badge"


@dataclass(frozen=True)
class Code:
    """A text in a fixed-width font, e.g. a name, a command or a hash."""

    text: str
    kind: ClassVar[str] = "code"


Cell = str | Badge | Code
"""A cell of a table, or a value in a list of pairs."""


@dataclass(frozen=True)
class Paragraph:
    """One or a few sentences; `quiet` is True for explanations, which are shown less prominently."""

    text: str
    quiet: bool = False
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Heading:
    """The heading of a part of a section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Pairs:
    """A list of names with their values."""

    rows: Sequence[tuple[str, Cell]]
    kind: ClassVar[str] = "pairs"


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and whether it holds numbers."""

    name: str
    numbers: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings; the first cell names its row. A folded table is closed until the reader opens it."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A chart, a sentence on how to read it, and its numbers.

    Attributes:
        title: title of the figure.
        chart: the picture.
        table: the numbers in the picture: one row for each point or bar.
        note: a sentence on how to read the picture.
    """

    title: str
    chart: Chart
    table: Table
    note: str = ""
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Gap:
    """A missing part of the page: the part, the reason why it is missing, and the commands that would add it."""

    what: str
    why: str
    commands: tuple[str, ...] = ()
    kind: ClassVar[str] = "gap"


@dataclass(frozen=True)
class Coloured:
    """A piece of running text, its gain from memory as a level (-3 … 3, 0 for no mark), and the gain in words."""

    text: str
    level: int
    words: str


@dataclass(frozen=True)
class Passage:
    """Running text whose pieces are marked by their gain from memory, with a label, a note, and each
    token's numbers.
    """

    label: str
    note: str
    pieces: Sequence[Coloured]
    legend: Sequence[tuple[int, str]]
    table: Table
    kind: ClassVar[str] = "passage"


Block = Paragraph | Heading | Pairs | Table | Figure | Gap | Passage
"""Anything that can be part of a section."""


@dataclass(frozen=True)
class Section:
    """A part of the page: its name in addresses, its title, a sentence on what it answers, and its blocks."""

    name: str
    title: str
    lead: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Return the section's missing parts."""
        return tuple(block for block in self.blocks if isinstance(block, Gap))

    @property
    def present(self) -> bool:
        """Return True if the section has content besides gaps, paragraphs and headings."""
        return any(not isinstance(block, Gap | Paragraph | Heading) for block in self.blocks)


@dataclass(frozen=True)
class KeyFigure:
    """One of the few numbers of the first screen: its name, its value, and a line below it."""

    name: str
    value: str
    below: str


@dataclass(frozen=True)
class Opening:
    """The picture at the top of a page: its message as a sentence, a figure, and a passage beside the figure."""

    title: str
    figure: Figure
    passage: Passage


@dataclass(frozen=True)
class Page:
    """Everything that a page shows.

    Attributes:
        title: the name of the bundle.
        kind: the kind of model, in one line.
        verdict: whether the bundle computes the same as the original model, in a few words.
        verdict_by: one sentence that names the check, its reference, and the number of gates.
        figures: the numbers of the first screen.
        sections: the sections in the order of the page.
        made: the program that made the page, and the time, if one was given.
        opening: the picture of the first screen; None if there is no measurement to show.
    """

    title: str
    kind: str
    verdict: Badge
    verdict_by: str
    figures: Sequence[KeyFigure]
    sections: Sequence[Section]
    made: str
    opening: Opening | None = None

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Return the missing parts of all sections."""
        return tuple(gap for section in self.sections for gap in section.gaps)
