"""Build the site: `make site`.

The pages stay where readers of the repository find them. They are copied into build/site/pages with what they link to,
so that every relative link works there: a page as a page, a picture as a file, a source file as a page with its text,
a folder as a page that lists it. mkdocs then refuses a link that leads nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "site"
SITE = ROOT / "site"
GIT = shutil.which("git") or "git"
WORKER = ROOT / ".site" / "node_modules" / "iframe-worker" / "shim" / "index.js"
"""The search's worker, which pages opened from a disk need."""
START = (
    "README.md",
    "runtime/cpp/include/txl.h",
    *(f"docs/site/{name}" for name in ("txl_runtime.md", "txl_export.md", "site.css", "site.js")),
)
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
FILES = {".png", ".svg", ".css", ".js"}
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
LAST = "---\nsearch: {boost: 0.2}\n---\n"
BEHIND = ("txl_", "CHANGELOG", "decisions", "design", "bundle-format", "own-models-reference", "serving-reference")
"""Begins of names of pages that the search offers behind those that explain."""
TRY = """
<details class="try" markdown="0">
<summary>Run samples/tiny.txl in this page ({size:.0f} MB, once)</summary>
<iframe src="try.html" loading="lazy" title="A language model that runs in this page"></iframe>
</details>
"""


def copy_pages(pages: Path) -> None:
    """Copy the pages, and all that they link to, into a folder."""
    left, met = [ROOT / name for name in START], set[Path]()
    while left:
        source = left.pop()
        if source in met:
            continue
        met.add(source)
        target = pages / page_of(source).relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in FILES:
            shutil.copyfile(source, target)
        elif source.suffix == ".md":
            text = source.read_text("utf-8")
            left += [(source.parent / link).resolve() for link in LINK.findall(text)]
            text = LINK.sub(lambda link, source=source: relinked(link[0], source.parent), text)
            behind = source.name.startswith(BEHIND) or source.parent.name == "measurements"
            target.write_text(LAST * behind + text, "utf-8")
        elif source.is_dir():
            names = tracked(source)
            left += [source / name for name in names]
            lines = [f"* [{name}]({os.path.relpath(page_of(source / name), source)})" for name in names]
            target.write_text("\n".join([f"{UNSEARCHED}# {source.relative_to(ROOT)}", "", *lines, ""]), "utf-8")
        else:
            kind = {".h": "c"}.get(source.suffix, source.suffix[1:])
            text = source.read_text("utf-8")
            target.write_text(f"{UNSEARCHED}# {source.relative_to(ROOT)}\n\n~~~~~~{kind}\n{text}~~~~~~\n", "utf-8")


def page_of(path: Path) -> Path:
    """Return the page of a linked file or folder: docs/a.md itself, samples/b.py.md, samples/own/index.md."""
    if path.is_dir():
        return path / ("README.md" if (path / "README.md").exists() else "index.md")
    return path if path.suffix in {".md", *FILES} else path.with_name(f"{path.name}.md")


def relinked(link: str, folder: Path) -> str:
    """Return a link of a page in `folder` as the site has it."""
    return os.path.relpath(page_of((folder / link).resolve()), folder)


def tracked(folder: Path) -> list[str]:
    """Return the names of a folder's files that belong to the repository, without those of folders in it."""
    found = subprocess.run([GIT, "ls-files", "."], cwd=folder, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in found.splitlines() if "/" not in name)


def add_model(pages: Path) -> None:
    """Put the sample model into the start page where onnxruntime-web is at hand (`make js`)."""
    modules = ROOT / ".js" / "node_modules" / "onnxruntime-web"
    if not modules.is_dir():
        print("onnxruntime-web is not here (make js); the start page runs no model")
        return
    made = pages / "try.html"
    command = [ROOT / ".venv/bin/txl-deploy", "package", ROOT / "samples/tiny.txl", "--target", "web", "--single"]
    subprocess.run([*command, "-o", made, "--onnxruntime-web", modules], check=True, stdout=subprocess.DEVNULL)
    home = pages / "README.md"
    text = home.read_text("utf-8")
    home.write_text(text.replace("\n## ", TRY.format(size=made.stat().st_size / 1e6) + "\n## ", 1), "utf-8")


def add_twins(pages: Path, settings: str) -> None:
    """Put every page's Markdown beside it (a.html, a.md), and their list, llms.txt, into the site."""
    for page in pages.rglob("*.md"):
        shutil.copyfile(page, SITE / page.relative_to(pages))
    lines = ["# txl-deploy", "", f"> {re.findall('site_description: (.+)', settings)[0]}."]
    for room, page in re.findall(r"^ +- (\w.*):$|([\w/.-]+\.md)$", settings.partition("\nnav:")[2], re.MULTILINE):
        if room:
            lines += ["", f"## {room}", ""]
        else:
            title = re.findall(r"^# (.+)", (pages / page).read_text("utf-8"), re.MULTILINE)[0]
            lines.append(f"- [{title}]({page})")
    (SITE / "llms.txt").write_text("\n".join([*lines, ""]), "utf-8")


def main() -> int:
    """Build the site into site/; return mkdocs' exit status."""
    pages = BUILD / "pages"
    shutil.rmtree(BUILD, ignore_errors=True)
    copy_pages(pages)
    add_model(pages)
    if WORKER.is_file():
        shutil.copyfile(WORKER, pages / "docs" / "site" / "iframe-worker.js")
    else:
        print("iframe-worker is not here (npm); pages opened from a disk have no search")
    settings = (Path(__file__).parent / "mkdocs.yml").read_text("utf-8")
    (BUILD / "mkdocs.yml").write_text(settings, "utf-8")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(command, cwd=BUILD, env=environment, check=False)
    if done.returncode == 0:
        add_twins(pages, settings)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
