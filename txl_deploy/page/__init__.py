"""The page on which people try a model: at /playground on a server, or beside the model in a package for browsers.

The page is the same in both places: `static/server.js` asks a server, `static/local.js` runs the model in the browser.
"""

from __future__ import annotations

from pathlib import Path

import txl_report

STATIC = Path(__file__).with_name("static")
"""Folder of the page's own files."""
HTML = "page.html"
"""File name of the page; a package has it as index.html."""
STYLES = (Path(txl_report.__file__).with_name("templates") / "base.css", STATIC / "page.css")
"""Style sheets in the page's order: the sheet that the page shares with reports, then the page's own sheet."""


def files() -> list[Path]:
    """Return the page's files, which a server sends unchanged."""
    return sorted({*STATIC.iterdir(), *STYLES})
