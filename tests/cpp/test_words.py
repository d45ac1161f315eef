"""Words of texts in C++ beside Python's: white space, delimiters and lower case, of all characters."""

from __future__ import annotations

import json
import random
import subprocess
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import msgspec
import published
import pytest
from txl_runtime.bundle.vocabulary import Words

pytestmark = [pytest.mark.slow(keep=9), pytest.mark.timeout(1200)]  # whoever comes first builds
ALL = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200), 0x10FFFF)]
"""Behind these are signs of Chinese, and nothing."""
SIGMAS = "ΣΣςσAaİ.'\u00ad\u0301\u0345ʰ1 \n\r\t\u2003\x85"
"""The characters beside a sigma decide its form; a few of these are of each kind."""


def differing(program: Path, vocabulary: Words, texts: Sequence[str]) -> list[str]:
    """The texts of which the two have other ids."""
    lines = [msgspec.json.encode(vocabulary).decode(), *(json.dumps(text) for text in texts)]
    said = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in said.splitlines()]
    return [text for text, ids in zip(texts, found, strict=True) if ids != vocabulary.encode(text).tolist()]


@pytest.mark.skipif(
    unicodedata.unidata_version != json.loads((published.DOCS / "bundle-cases.json").read_bytes())["unicode"],
    reason="this Python has another Unicode than the table",
)
def test_every_character_is_lowered_as_python_lowers_it(built: Path) -> None:
    symbols = tuple(dict.fromkeys(["<unk>", *ALL, *(part for character in ALL for part in character.lower())]))
    vocabulary = Words(symbols=symbols, unknown=0, lower_case=True, delimiter="")
    beside = [
        text for character in ALL for text in (f"{character}Σ", f"a{character}Σ", f"aΣ{character}", f"aΣ{character}a")
    ]
    texts = ["-".join(beside[at : at + 64]) for at in range(0, len(beside), 64)]
    assert not differing(built / "txl-words", vocabulary, texts)


@pytest.mark.parametrize("delimiter", [None, "", ",", "ß", "Σ", "ab"])
@pytest.mark.parametrize("lower_case", [False, True])
def test_random_lines_have_the_words_that_python_finds(built: Path, delimiter: str | None, lower_case: bool) -> None:
    draw = random.Random(f"{delimiter} {lower_case}")
    pools = (SIGMAS, "aAbB, \n", "".join(draw.sample(ALL, 200)) + SIGMAS, "ßẞ,Σab \u3000")
    texts = ["".join(draw.choices(draw.choice(pools), k=draw.randrange(12))) for _ in range(3000)]
    parts = {part for text in texts for part in (*text, *text.lower(), *text.lower().split(delimiter or None))}
    vocabulary = Words(
        symbols=("<s>", "</s>", "<unk>", *sorted(parts)),
        unknown=2,
        line_start=0,
        line_end=1,
        lower_case=lower_case,
        delimiter=delimiter,
    )
    assert not differing(built / "txl-words", vocabulary, texts)
