"""Serve the playground: a page on which people try the model."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).with_name("static")
"""Folder of the page's files, which are served unchanged."""
