"""Pictures of the report and of the playground: three widths, two themes, for people to look at.

    python tests/browser/screenshots.py BUNDLE --out FOLDER [--text FILE] [--bench FILE.json] [--only report|playground]

The playground is pictured after a generation, with the alternatives of a token, a generation with and without memory,
and the losses compared. Pictures have at most 128 colours, so that they are small. FOLDER/docs has those of docs/.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from browsing import SCHEMES, WIDTHS, browser, opened
from playing import playing

PROMPT = "class Stream:\n    def __init__(self, model, batch_size):\n        self.model = model\n        self."


def save(page: Any, path: Path, **options: Any) -> None:
    """A picture, with few colours where Pillow is installed."""
    data = page.screenshot(**options)
    path.parent.mkdir(exist_ok=True)
    try:
        from PIL import Image
    except ImportError:
        path.write_bytes(data)
    else:
        Image.open(io.BytesIO(data)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def clip(width: float, height: float) -> dict[str, float]:
    """The upper left part of a page, in its pixels."""
    return {"x": 0, "y": 0, "width": width, "height": height}


def report(chrome: Any, page: Path, out: Path) -> None:
    """A report in every width and theme, whole."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            with opened(chrome, page.as_uri(), width=width, scheme=scheme) as window:
                save(window.page, out / f"report-{width}-{scheme}.png", full_page=True)
                if (width, scheme) == (1400, "light"):
                    save(window.page, out / "docs" / "report.png", full_page=True, clip=clip(1400, 1150))
                if (width, scheme) == (380, "dark"):
                    save(window.page, out / "docs" / "report-380-dark.png", full_page=True, clip=clip(380, 1400))


def playground(chrome: Any, address: str, out: Path) -> None:
    """The playground after a generation."""
    with opened(chrome, address, width=1400) as window:
        page = window.page
        page.get_by_role("status").filter(has_text="Ready").wait_for()
        page.get_by_role("textbox", name="Text to add").fill(PROMPT)
        page.get_by_role("spinbutton", name="Tokens to generate").fill("160")
        page.get_by_role("spinbutton", name="Temperature").fill("0.7")
        page.get_by_role("button", name="With and without memory").click()
        page.get_by_role("status").filter(has_text="with memory and without").wait_for(timeout=60_000)
        page.get_by_role("button", name="Generate", exact=True).click()
        page.get_by_role("status").filter(has_text="Generated").wait_for(timeout=60_000)
        page.get_by_role("button", name="Compare losses").click()
        page.get_by_role("status").filter(has_text="Compared").wait_for(timeout=60_000)
        page.locator("#text [role=option]").nth(len(PROMPT) + 12).click()
        for width in WIDTHS:
            for scheme in SCHEMES:
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                save(page, out / f"playground-{width}-{scheme}.png", full_page=True)
                if (width, scheme) == (1400, "light"):
                    save(page, out / "docs" / "playground.png", full_page=True)
                if (width, scheme) == (380, "dark"):
                    save(page, out / "docs" / "playground-380-dark.png", full_page=True, clip=clip(380, 1500))


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--only", choices=("report", "playground"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser() as chrome:
        if given.only != "playground":
            from txl_export.families.registry import facts_of_bundle
            from txl_report import write_report

            page = Path(folder) / "report.html"
            more = {"text": given.text, "bench": given.bench, "context": given.text is not None}
            write_report(given.bundle, page, describe=facts_of_bundle, **more)
            report(chrome, page, given.out)
        if given.only != "report":
            with playing(given.bundle) as started:
                playground(chrome, started.address, given.out)


if __name__ == "__main__":
    main()
