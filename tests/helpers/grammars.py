"""Grammars as functions of the tokens so far, which return the tokens that may come next."""

from __future__ import annotations

import numpy as np

PITCHES, LENGTHS = range(60, 73), range(100, 108)


def alternating(tokens: np.ndarray) -> range:
    """A pitch, then how long it lasts."""
    return LENGTHS if len(tokens) and int(tokens[-1]) in PITCHES else PITCHES


class _Next(Exception):
    pass


class _Reader:
    """Reads an object of JSON, and raises what may come where the text ends."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def one_of(self, characters: str) -> str:
        if self.at == len(self.text):
            raise _Next(characters)
        found = self.text[self.at]
        assert found in characters, f"{self.text!r} is broken at {self.at}"
        self.at += 1
        return found

    def word(self, characters: str) -> None:
        for character in characters:
            self.one_of(character)

    def string(self) -> None:
        self.word('"')
        for _ in range(4):
            if self.one_of('abc "') == '"':
                return
        self.word('"')

    def value(self, depth: int) -> None:
        first = self.one_of('"tn-123' + "{" * (depth > 0))
        if first in '"{':
            self.at -= 1
            self.string() if first == '"' else self.object(depth - 1)
        elif first in "tn":
            self.word({"t": "rue", "n": "ull"}[first])
        elif first == "-":
            self.one_of("123")

    def object(self, depth: int = 2) -> None:
        self.word("{")
        if self.one_of('}"') == "}":
            return
        self.at -= 1
        while True:
            self.string()
            self.word(":")
            self.value(depth)
            if self.one_of(",}") == "}":
                return


def json_lines(tokens: np.ndarray) -> bytes:
    """Objects of JSON, one in each line; tokens are bytes."""
    reader = _Reader(bytes(tokens.tolist()).decode().rpartition("\n")[2])
    try:
        reader.object()
        reader.word("\n")
    except _Next as expected:
        return str(expected).encode()
    raise AssertionError("a line goes on behind its end")
