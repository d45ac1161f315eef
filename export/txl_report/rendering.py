"""Render blocks as HTML with the templates of this package."""

from __future__ import annotations

import unicodedata
from functools import cache
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING

from txl_runtime.errors import BackendError
from txl_runtime.installing import pip_line

from txl_report.blocks import Page
from txl_report.visible import MOST, as_one_line, pieces

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

RIGHT_TO_LEFT = {"R", "AL", "AN"}
"""Unicode's bidirectional classes of characters that are written from right to left."""
MOST_IN_A_ROW = 100_000
"""Maximum number of characters of a text that must not be shortened, such as a command."""


def require_jinja() -> None:
    """Check that jinja2 is installed.

    Raises:
        BackendError: jinja2 is missing; the message says how to install it.
    """
    if find_spec("jinja2") is None:
        raise BackendError(f"a report needs jinja2, not installed here; {pip_line('report')}")


def render(page: Page) -> str:
    """Render the page as one HTML document: the same page gives the same text."""
    require_jinja()
    return _environment().get_template("page.html.j2").render(page=page, numbered=count(1).__next__) + "\n"


@cache
def _environment() -> Environment:
    """Make the jinja2 environment, which escapes every value and raises an error for an undefined one."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("txl_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "line": as_one_line, "command": _command, "drawn": _drawn}
    return environment


def _command(text: str) -> Markup:
    """Show a command in full, because a shortened command could not be typed."""
    return shown(text, MOST_IN_A_ROW)


def shown(text: str, most: int = MOST) -> Markup:
    """Return a text as safe markup: escaped, with symbols for invisible characters, and right-to-left text isolated."""
    from markupsafe import Markup, escape

    symbol = Markup('<span class="symbol">{}</span>')
    parts = Markup("").join(symbol.format(run) if is_symbol else escape(run) for run, is_symbol in pieces(text, most))
    other = any(unicodedata.bidirectional(character) in RIGHT_TO_LEFT for character in text[:most])
    return Markup("<bdi>{}</bdi>").format(parts) if other else parts


def _drawn(drawing: str) -> Markup:
    """Return a chart's drawing as markup; ElementTree has already escaped its texts."""
    from markupsafe import Markup

    return Markup(drawing)  # noqa: S704 - made by charts/, of numbers and of texts that were escaped there
