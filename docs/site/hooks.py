"""Changes of pages while mkdocs builds them: what a screen reader needs and the theme leaves out."""

from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Return a page whose tables have no header without text."""
    return html.replace("<th></th>", "<td></td>")


def on_post_page(output: str, **_: Any) -> str:
    """Return a page whose search has a name."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
