"""The page on which people try a model: at /playground on a server, or beside the model in a package for browsers.

It is the same page over two back ends, `static/server.js` and `static/local.js`.
"""

from __future__ import annotations

from pathlib import Path

import txl_report

STATIC = Path(__file__).with_name("static")
"""Folder of the page's own files."""
HTML = "page.html"
"""File name of the page; a package has it as index.html."""
STYLES = (Path(txl_report.__file__).with_name("templates") / "base.css", STATIC / "page.css")
"""The style that the page shares with reports, and its own, in the order in which the page has them."""


def files() -> list[Path]:
    """Return the page's files, which a server sends unchanged."""
    return sorted({*STATIC.iterdir(), *STYLES})
