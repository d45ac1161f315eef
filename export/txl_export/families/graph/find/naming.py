"""Read from the names of an input and an output whether they are one state. One table holds every known word."""

from __future__ import annotations

import re
from functools import lru_cache

LATER = frozenset(["new", "next", "present", "updated", "update", "curr", "current", "nxt", "now"])
EARLIER = frozenset(["old", "prev", "previous", "past", "last", "init", "initial"])
SIDES = frozenset(["in", "out", "input", "output", "i", "o", "n", "ret", "return", "returned", "result", "res"])
RETURNED = "r_"
"""Before the name of what is returned, as WeNet and wekws write r_att_cache."""
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
"""Words that together are what a layer hands to the next one, hardly what a call hands to the next."""
_CACHES = re.compile(r"(past|present)_?key_?values")
"""Exporters of decoders call their caches so; the other side is called past or present alone."""
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def likeness(given: str, returned: str) -> int:
    """Grade how surely the names of an input and an output say that they are one state.

    Returns:
        2: they differ by a word of time or by a side, and one of their words is of a state. 1: the rest of both is the
        same, and not a word of data. 0: neither.
    """
    if returned.startswith(RETURNED) and not given.startswith(RETURNED):
        returned = f"new_{returned.removeprefix(RETURNED)}"
    first, second = _words(given), _words(returned)
    if ({*second} & EARLIER) - {*first} or ({*first} & LATER) - {*second}:
        return 0  # what comes later is given, or what was earlier returned
    early, late = {*first} & EARLIER, {*second} & LATER
    stem, other = _rest(first), _rest(second)
    if first == second or not (stem or other):
        return 2 if early and late else 0
    bare = {_stem(word) for word in stem} | {*stem}
    if not _same(stem, other) or bare & DATA or bare >= LAYERS or all(word.isdecimal() for word in bare):
        return 0
    return 2 if early or late or bare & STATES else 1


def means_data(name: str) -> bool:
    """Return whether a name has words of data alone, as `noisy_frame`."""
    stem = [word for word in _rest(_words(name)) if not word.isdecimal()]
    return bool(stem) and {*stem} <= DATA


def speaks_of(name: str, *words: str) -> bool:
    """Return whether one of a name's words begins with one of these."""
    return any(part.startswith(words) for part in _words(name))


def _rest(words: list[str]) -> list[str]:
    """Words without those of time and sides."""
    return [word for word in words if word not in LATER | EARLIER | SIDES]


def _same(stem: list[str], other: list[str]) -> bool:
    """Return whether two names have one rest: as it stands, or but for a letter that stands for a side (h and hn)."""
    unlike = [(a, b) for a, b in zip(stem, other, strict=False) if a != b]
    alike = not unlike or (len(unlike) == 1 and _stem(unlike[0][0]) == _stem(unlike[0][1]))
    return bool(stem) and len(stem) == len(other) and alike


def _stem(word: str) -> str:
    """A word without a last letter that says where it stands: h0 and hn, hx and hy, r1i and r1o."""
    return word[:-1] if len(word) > 1 and word[0].isalpha() and word[-1] in "nxyio0t" else word


@lru_cache(2**12)
def _words(name: str) -> list[str]:
    joined: list[str] = []
    for part in map(str.lower, _PARTS.findall(_CACHES.sub(r"\1", name))):
        if (
            joined and part in ("0", "n") and len(joined[-1]) == 1
        ):  # h0 and h_0 are one word where a letter stands alone
            joined[-1] += part
        else:
            joined.append(part)
    return joined
