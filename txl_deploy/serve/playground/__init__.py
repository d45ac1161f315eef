"""The playground: a page of the server on which people try the model."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).with_name("static")
"""The folder of the page's files, which are served as they are."""
