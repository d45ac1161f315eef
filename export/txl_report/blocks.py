"""What a page is put together from: sections of a few kinds of blocks, plain values without any markup.

A section's module says what stands there; `templates/` says how each kind of block looks. Every text in a block may
come from a stranger: the templates show all of them through one filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from txl_report.charts.figure import Chart

State = Literal["passed", "failed", "none"]


@dataclass(frozen=True)
class Badge:
    """A sign and its words: what became of a judgement is never shown by colour alone."""

    state: State
    text: str
    kind: ClassVar[str] = "badge"


@dataclass(frozen=True)
class Code:
    """Something that is typed or computed: a name, a hash."""

    text: str
    kind: ClassVar[str] = "code"


Cell = str | Badge | Code


@dataclass(frozen=True)
class Paragraph:
    """One or a few sentences. `quiet` ones explain how something was done."""

    text: str
    quiet: bool = False
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Heading:
    """Begins a part of a section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Pairs:
    """Names and what they are."""

    rows: Sequence[tuple[str, Cell]]
    kind: ClassVar[str] = "pairs"


@dataclass(frozen=True)
class Column:
    """Of a table: its heading, and whether it holds numbers."""

    name: str
    numbers: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings; the first cell of a row is its name. A folded one is opened by its reader."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A chart, what can be seen in it, and its numbers.

    Attributes:
        title: what it shows.
        chart: the picture.
        table: the same as numbers: one row for each point or bar.
        note: a sentence on how to read it.
    """

    title: str
    chart: Chart
    table: Table
    note: str = ""
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Gap:
    """What is not there: why, in one sentence, and the commands that would add it."""

    what: str
    why: str
    commands: tuple[str, ...] = ()
    kind: ClassVar[str] = "gap"


@dataclass(frozen=True)
class Coloured:
    """A piece of running text: what to show, how much it gained (-3 … 3, 0 for nothing), and that in words."""

    text: str
    level: int
    words: str


@dataclass(frozen=True)
class Passage:
    """Running text whose pieces are marked by what they gained: which text it is, and the numbers of each token."""

    label: str
    note: str
    pieces: Sequence[Coloured]
    legend: Sequence[tuple[int, str]]
    table: Table
    kind: ClassVar[str] = "passage"


Block = Paragraph | Heading | Pairs | Table | Figure | Gap | Passage


@dataclass(frozen=True)
class Section:
    """A part of the page: its name in addresses, its title, a sentence on what it answers, and its blocks."""

    name: str
    title: str
    lead: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the section has not."""
        return tuple(block for block in self.blocks if isinstance(block, Gap))

    @property
    def present(self) -> bool:
        """Whether it has anything beside what it says of what it has not."""
        return any(not isinstance(block, Gap | Paragraph | Heading) for block in self.blocks)


@dataclass(frozen=True)
class KeyFigure:
    """One of the few numbers of the first screen: its name, itself, and a line below it."""

    name: str
    value: str
    below: str


@dataclass(frozen=True)
class Opening:
    """The picture that a page opens with: what can be seen in it as a sentence, a figure, and a passage beside it."""

    title: str
    figure: Figure
    passage: Passage


@dataclass(frozen=True)
class Page:
    """Everything that a page shows.

    Attributes:
        title: the name of the bundle.
        kind: what it is, in one line.
        verdict: whether it is the same model, in a few words.
        verdict_by: by what, against what and how many gates: one sentence.
        figures: the numbers of the first screen.
        sections: in the order in which they stand.
        made: by what, and when if that was given.
        opening: the picture of the first screen; None where nothing was measured that it could show.
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
        """What none of the sections has."""
        return tuple(gap for section in self.sections for gap in section.gaps)
