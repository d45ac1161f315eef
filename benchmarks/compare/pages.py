"""Prove that a change to the schema or to the page neither alters a page nor accepts a document that was refused.

    python benchmarks/compare/pages.py OLD NEW BUNDLE... [--lies 400]

OLD and NEW are checkouts with a `.venv`. Both make the page of every bundle: without a document, with the bundle's own
report.json as a later verification, and with NAME.bench.json if that lies beside NAME.txl. The pages are compared byte
by byte. Then both get the same documents with one fault each, a "lie": a value is removed, or replaced by a wrong one.
The messages of both are compared word for word. A lie that only NEW refuses is no difference; the fields of such lies
are counted. `--lies` is the number of lies for each document, chosen at even steps.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

VALUES: tuple[Any, ...] = (None, -1, 0, 1, 1e300, 2**63, "word", "", True, [], {}, [None], {"a": 1})
"""Values that replace a correct value of a document, to see if the page refuses the document."""
MOST_ITEMS = 3
"""The number of items of a list in which faults are tried; later items have the same form."""

MOST_CHANGES = 12
"""The largest number of changed lines of a page that are printed."""
A_PAGE = "a page"

CHILD = """
import json, re, sys
from pathlib import Path
from txl_export.families.registry import facts_of_bundle
from txl_report import page_of
from txl_report.facts.gathering import gather
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.errors import TxlError

for line in sys.stdin:
    bundle, option, name, page = json.loads(line)
    opened = open_bundle(Path(bundle))
    described = facts_of_bundle(opened.manifest)
    try:
        made = page_of(gather(opened, described, **({option: Path(name)} if option else {})))
        if page:
            Path(page).write_text(made, "utf-8", "surrogatepass")
        said = "a page"
    except TxlError as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
"""


class Question(NamedTuple):
    """A bundle, the option of its page that takes a document ("" without one), the document, and its fault (or "")."""

    bundle: str
    option: str = ""
    document: str = ""
    lie: str = ""


class Answer(NamedTuple):
    """A checkout's answer: `A_PAGE` or the error's message, and the text of the page ("" after an error)."""

    said: str
    page: str


def lies(document: Any, most: int) -> Iterator[tuple[str, Any]]:
    """Yield copies of a document with one fault each, and before each copy its fault in words, e.g. "gates.0 is gone".

    At even steps about `most` of all faults are chosen.
    """
    results = list(_lies(document))
    step = max(1, len(results) // most)
    for path, value in results[::step]:
        text = "is gone" if value is ... else f"is {json.dumps(value)}"
        yield f"{'.'.join(map(str, path))} {text}", _with(document, path, value)


def _lies(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if path:
        yield path, ...  # the ellipsis marks a value that is removed
        yield from ((path, other) for other in VALUES if other != value or type(other) is not type(value))
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value[:MOST_ITEMS]):
            yield from _lies(each, (*path, name))


def _with(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(document))
    place = changed
    for name in path[:-1]:
        place = place[name]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


def ask(checkout: Path, questions: list[Question], into: Path) -> list[Answer]:
    """Let a checkout make the page of each question in a new folder `into`; return its answers."""
    into.mkdir()
    pages = [into / f"{index}.html" for index in range(len(questions))]
    asked = [
        (question.bundle, question.option, question.document, str(page))
        for question, page in zip(questions, pages, strict=True)
    ]
    done = subprocess.run(
        [checkout / ".venv/bin/python", "-c", CHILD],
        input="".join(json.dumps(each) + "\n" for each in asked),
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) < len(questions):
        raise SystemExit(f"{checkout}: {done.stderr[-2000:]}")
    made = (page.read_text("utf-8", "surrogatepass") if page.exists() else "" for page in pages)
    return [Answer(*pair) for pair in zip(answers, made, strict=True)]


def questions_of(bundles: list[Path], most: int, folder: Path) -> Iterator[Question]:
    """Yield the questions of every bundle: without a document, with each document, and with each faulty document.

    Args:
        bundles: the paths of the bundles.
        most: about the number of faulty documents for each document.
        folder: the folder into which the faulty documents are written.
    """
    for number, bundle in enumerate(bundles):
        path = str(bundle.resolve())
        yield Question(path)
        for option, document in (("verify", bundle / "report.json"), ("bench", bundle.with_suffix(".bench.json"))):
            if document.is_file():
                yield Question(path, option, str(document.resolve()))
                for index, (lie, changed) in enumerate(lies(json.loads(document.read_bytes()), most)):
                    file = folder / f"{number}-{option}-{index}" / document.name
                    file.parent.mkdir()
                    file.write_text(json.dumps(changed))
                    yield Question(path, option, str(file), lie)


def main() -> int:
    """Print every difference and the number of comparisons; the status is 1 if there is a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--lies", type=int, default=400)
    options = parser.parse_args()
    differing, stricter = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="txl-pages-") as folder:
        questions = list(questions_of(options.bundles, options.lies, Path(folder)))
        before, after = (ask(getattr(options, side), questions, Path(folder) / side) for side in ("old", "new"))
    for question, old, new in zip(questions, before, after, strict=True):
        if question.lie and old.said == A_PAGE != new.said:
            stricter[re.sub(r"\.\d+|( is .*)", "", question.lie)] += 1
        elif old != new:
            differing += 1
            one, other = (answer.page.replace("<", "\n<").splitlines() for answer in (old, new))
            changes = list(difflib.unified_diff(one, other, n=0, lineterm=""))[:MOST_CHANGES]
            print(Path(question.bundle).name, question.option, question.lie)
            print(f"  - {old.said}", f"  + {new.said}", *changes, sep="\n  ")
    names = [old for question, old in zip(questions, before, strict=True) if question.lie]
    refused = sum(old.said != A_PAGE for old in names)
    print(f"{len(questions) - len(names)} pages and {len(names)} lies, {refused} of them refused: {differing} differ")
    if stricter:
        text = ", ".join(f"{name} {count}" for name, count in stricter.most_common())
        print(f"{stricter.total()} lies are refused by the new one alone: {text}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
