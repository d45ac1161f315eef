"""Make one page that describes a bundle and shows how it was verified. Needs jinja2, but no PyTorch.

`write_report` makes the page from a bundle; `page_of` makes it from facts (`txl_report.facts.gathering.gather`) and
measurements (`txl_report.measuring`). Both functions are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txl_report.page import page_of
    from txl_report.writing import write_report

__all__ = ["page_of", "write_report"]


def __getattr__(name: str) -> object:
    if name == "write_report":
        from txl_report.writing import write_report

        return write_report
    if name == "page_of":
        from txl_report.page import page_of

        return page_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
