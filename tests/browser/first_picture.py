"""The README's picture: what an export printed in a terminal, beside the top of the report that it wrote.

script -qc "txl-deploy export model.pt --text heldout.txt" export.txt
python tests/browser/first_picture.py export.txt docs/report.png docs/first-picture.svg
"""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

LINES, COLUMNS = 41, 92
"""The last lines of the terminal that are drawn, and their width."""
SIDE = 900
"""Width of the report's top in the picture, in pixels."""


def terminal(recorded: str, command: str) -> str:
    """Draw the last lines of a terminal's output as an SVG text."""
    lines = [line.rpartition("\r")[2] for line in recorded.replace("\r\n", "\n").splitlines()]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False)
    console.print(Text(f"$ {command}", style="bold"))
    for line in lines[-LINES:]:
        console.print(Text.from_ansi(line))
    drawn = console.export_svg(title="txl-deploy export", unique_id="export")
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.S)  # those are fetched from a network


def main() -> None:
    """Read the record and the picture of the report, and write the SVG."""
    record, report, out = map(Path, sys.argv[1:])
    head, *_ = record.read_text("utf-8").splitlines()
    command = re.findall(r'COMMAND="(?:stty [^;]*; )?(?:\S*/)?(txl-deploy [^"]*)"', head)[0]
    text = "\n".join(line for line in record.read_text("utf-8").splitlines() if not line.startswith("Script "))
    drawn = terminal(text.rstrip(), command)
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0])
    png = report.read_bytes()
    sizes = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    tall = SIDE * sizes[1] / sizes[0]
    scale = tall / height
    inner = drawn.replace("<svg ", f'<svg x="0" y="0" width="{width * scale:.0f}" height="{tall:.0f}" ', 1)
    data = base64.b64encode(png).decode()
    left = width * scale + 20
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + SIDE:.0f} {tall:.0f}">{inner}'
        f'<image x="{left:.0f}" y="0" width="{SIDE}" height="{tall:.0f}" href="data:image/png;base64,{data}"/></svg>\n',
        "utf-8",
    )


if __name__ == "__main__":
    main()
