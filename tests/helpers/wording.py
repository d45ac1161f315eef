"""Finds docstrings and comments that begin without a subject or leave a number out; `make lint` fails if there are any.

python tests/helpers/wording.py [FILE or folder …]      # without any: all files that git does not ignore
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

BEGINNING = re.compile(r"(What|How|Whether|Of|Where|Which|Why)\b")
INSIDE = {
    re.compile(r"\bso (many|much)\b(?! that)", re.IGNORECASE): "name the number",
    re.compile(r"\banother one\b", re.IGNORECASE): "say different, second or new",
}
C_LIKE = (".c", ".cpp", ".h", ".hpp", ".js")
NOT_OURS = ("third_party", "fixtures")
_COMMENT = re.compile(r"^\s*(?:/\*+|\*(?!/)|//+)[!<]*\s*(.*)|\s//+[!<]*\s+(.*)")


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, string that stands alone, and block of comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, " ".join(node.value.value.split())
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    yield from _blocks(
        (token.start[0], token.line.lstrip()[0] == "#", token.string.lstrip("#! ")) for token in comments
    )


def texts_of_c(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each block of comments."""
    found = ((number, _COMMENT.search(line)) for number, line in enumerate(source.splitlines(), 1))
    yield from _blocks((number, match[1] is not None, match[1] or match[2] or "") for number, match in found if match)


def _blocks(lines: Iterator[tuple[int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Join comments that fill lines one after the other: the first line's number, and all words."""
    first, last, words = 0, -1, list[str]()
    for number, alone, text in lines:
        if words and not (alone and number == last + 1):
            yield first, " ".join(words)
            words = []
        first, last = first if words else number, number if alone else -1
        words.append(text)
    if words:
        yield first, " ".join(words)


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each fault of a file: "stream.py:12: begins with What; begin with a verb or a noun"."""
    source = path.read_text("utf-8")
    for line, text in sorted((texts_of_python if path.suffix == ".py" else texts_of_c)(source)):
        if match := BEGINNING.match(text):
            yield f"{path}:{line}: begins with {match[0]}; begin with a verb or a noun"
        for pattern, advice in INSIDE.items():
            yield from (f"{path}:{line}: {match[0]!r}; {advice}" for match in pattern.finditer(text))


def main(places: list[str]) -> int:
    """Print all faults; 1 if there are any."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *places]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in listed if name.endswith((".py", *C_LIKE)) and not any(n in name for n in NOT_OURS)]
    found = [fault for path in files if path.is_file() for fault in faults(path)]
    print("\n".join(found) if found else f"wording: nothing in {len(files)} files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
