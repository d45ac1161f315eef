"""Reads from the names of an input and an output whether they are one state; holds all known words."""

from __future__ import annotations

import re
from functools import lru_cache

LATER = frozenset(["new", "next", "present", "updated", "update", "curr", "current", "nxt", "now"])
EARLIER = frozenset(["old", "prev", "previous", "past", "last", "init", "initial"])
SIDES = frozenset(["in", "out", "input", "output", "i", "o", "n", "ret", "return", "returned", "result", "res"])
RETURNED = "r_"
"""Prefix of returned states in WeNet and wekws, e.g. r_att_cache."""
STATES = frozenset(
    re.findall(
        r"\w+",
        "h c hx cx hc hidden cell state states cache caches cached mem mems memory memories kv key keys value values k "
        "v ctx buf buffer buffers carry ssm lstm gru rnn conv fifo history hist ring queue lag window accum recurrent",
    )
)
DATA = frozenset(
    re.findall(
        r"\w+",
        "x y image images img frame frames audio wav waveform sample samples noisy clean mask masks src tgt source "
        "target mel spec spectrum data feature features feats obs observation observations tokens token ids pixel "
        "pixels video signal speech logits logit embeds embedding embeddings latent latents cond query",
    )
)
LAYERS = frozenset(("hidden", "states"))
"""Words that together name the result of a layer for the next layer, which is hardly a state between calls."""
_CACHES = re.compile(r"(past|present)_?key_?values")
"""Names of decoders' caches, e.g. past_key_values, whose counterpart may be called only "past" or "present"."""
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def likeness(given: str, returned: str) -> int:
    """Return a grade, 0 to 2, of how clearly the names of an input and an output say that they are one state.

    Returns:
        2: the names differ by a word of time or side ("past", "out"), and contain a word for states. 1: apart from such
            words they are equal and contain no word for data. 0: anything else.
    """
    if returned.startswith(RETURNED) and not given.startswith(RETURNED):
        returned = f"new_{returned.removeprefix(RETURNED)}"
    first, second = _words(given), _words(returned)
    if ({*second} & EARLIER) - {*first} or ({*first} & LATER) - {*second}:
        return 0  # the input has a word like "new", or the output one like "past"
    early, late = {*first} & EARLIER, {*second} & LATER
    stem, other = _rest(first), _rest(second)
    if first == second or not (stem or other):
        return 2 if early and late else 0
    bare = {_stem(word) for word in stem} | {*stem}
    if not _same(stem, other) or bare & DATA or bare >= LAYERS or all(word.isdecimal() for word in bare):
        return 0
    return 2 if early or late or bare & STATES else 1


def means_data(name: str) -> bool:
    """Return whether a name consists of words for data only, e.g. `noisy_frame`."""
    stem = [word for word in _rest(_words(name)) if not word.isdecimal()]
    return bool(stem) and {*stem} <= DATA


def speaks_of(name: str, *words: str) -> bool:
    """Return whether one of a name's words begins with one of `words`."""
    return any(part.startswith(words) for part in _words(name))


def _rest(words: list[str]) -> list[str]:
    """Return the words that name neither a time, e.g. "past", nor a side, e.g. "out"."""
    return [word for word in words if word not in LATER | EARLIER | SIDES]


def _same(stem: list[str], other: list[str]) -> bool:
    """Return whether two lists of words are equal, or differ by one last letter that stands for a side (h and hn)."""
    unlike = [(a, b) for a, b in zip(stem, other, strict=False) if a != b]
    alike = not unlike or (len(unlike) == 1 and _stem(unlike[0][0]) == _stem(unlike[0][1]))
    return bool(stem) and len(stem) == len(other) and alike


def _stem(word: str) -> str:
    """Return a word without a last letter that marks a side: "h" for h0 and hn, "r1" for r1i and r1o."""
    return word[:-1] if len(word) > 1 and word[0].isalpha() and word[-1] in "nxyio0t" else word


@lru_cache(2**12)
def _words(name: str) -> list[str]:
    joined: list[str] = []
    for part in map(str.lower, _PARTS.findall(_CACHES.sub(r"\1", name))):
        if joined and part in ("0", "n") and len(joined[-1]) == 1:  # h_0 counts as one word, like h0
            joined[-1] += part
        else:
            joined.append(part)
    return joined
