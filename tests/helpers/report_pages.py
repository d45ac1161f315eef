"""Facts and measurements to show in a report, and a strict reader of HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import msgspec
from txl_report.measuring.results import (
    ContextMeasure,
    Loss,
    MemoryGain,
    MemoryLoss,
    PositionLoss,
    TextMeasures,
    TokenGain,
)
from txl_report.page import Measures
from txl_runtime.bundle.manifest import Manifest

VOID = {"meta", "img", "br", "link", "hr", "input"}
KEPT = {"verdict", "unit", "within"}
"""Fields whose texts are one of a few words or numbers and never a stranger's."""


def replaced(value: Any, by: Callable[[str], str]) -> Any:
    """A value made of data classes and structs, with every text in it replaced."""
    if isinstance(value, str):
        return by(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(each, by) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(replaced(each, by) for each in value)
    if isinstance(value, dict):
        return {replaced(name, by): replaced(each, by) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{name: each if name in KEPT else replaced(each, by) for name, each in fields.items()}
        )
    if isinstance(value, Manifest):  # the texts of it that a page shows; its tables are among the facts beside it
        family = {"name": by("family"), "dialect": {"family": by("family")}}
        texts = {name: by(getattr(value, name)) for name in ("model_id", "precision")}
        return msgspec.structs.replace(value, **texts, files=replaced(value.files, by), family=family)
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in KEPT}
        return msgspec.structs.replace(value, **{name: replaced(each, by) for name, each in fields.items()})
    return value


def measures(text: str = "word ") -> Measures:
    """Everything that can be measured, with small numbers."""
    loss = Loss(100, 1.5, 0.01, 4.48)
    token = TokenGain(7, 3, text, 1.0, 3.0)
    gain = MemoryGain(100, 0.2, 0.01, 0.6, 0.1)
    texts = TextMeasures(
        given=400,
        used=300,
        warm_up=16,
        sequences=1,
        segment_length=4,
        memory_length=8,
        loss=loss,
        by_position=tuple(PositionLoss(at, at, loss, loss) for at in range(4)),
        by_memory=tuple(MemoryLoss(rows, loss, 0.1, 0.01) for rows in (0, 2, 4, 8)),
        passage=(token, TokenGain(8, 4, text, 2.0, 1.0), TokenGain(9, 4, text, 2.0, 2.0)),
        gain=gain,
        notes=("a note",),
        of_bytes=True,
    )
    context = ContextMeasure(400, 300, 100, 8, 24, (0.05, 0.025, 0.01))
    return Measures("text.txt", texts, context)


class Page(HTMLParser):
    """Reads a page, and refuses what is not nested as it should be.

    Attributes:
        found: every element's name and attributes, in order.
        text: all text outside of the style sheet.
        alone: texts of elements by their path of names, such as "html head title".
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text, self.open = "", list[str]()
        self.alone: dict[str, str] = {}
        self.feed(page)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open or tag == "svg", f"<{tag}/> outside of a drawing"
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        path = " ".join(self.open)
        self.alone[path] = self.alone.get(path, "") + data

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element of a name."""
        return [attributes for name, attributes in self.found if name == tag]
