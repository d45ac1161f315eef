"""What names say of an input and an output: whether they may be one state. Names are a hint, and no proof."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain, zip_longest

LATER = frozenset(["new", "next", "present", "updated", "update", "curr", "current", "nxt", "now"])
EARLIER = frozenset(["old", "prev", "previous", "past", "last", "init", "initial"])
SIDES = frozenset(["in", "out", "input", "output", "i", "o", "n", "ret", "return", "returned", "result", "res"])
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
"""What exporters of decoders call their caches; the other side is called past or present alone."""
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"\d{1,9}")


def likeness(given: str, returned: str) -> int:
    """How much the names of an input and an output say that they are one state.

    Returns:
        2: they differ by a word of time or by a side, and one of their words is of a state. 1: the rest of both is the
        same, and not a word of data. 0: neither.
    """
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


def kinship(name: str, other: str) -> int:
    """How much two names say that they are of one thing: 3 the same name, 2 the same beside words of time, sides and
    "state", 1 the same but for one letter that stands for a side, 0 another.
    """
    one, two = _bare(name), _bare(other)
    return 3 if name == other else 2 if one == two else int(_same(one, two))


def counted_alike(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Some names as they are compared with others. Where as many of the others differ from them, and from each other,
    by a number alone, they get these numbers in their order: layers may be counted from zero there and from one here.
    """
    groups, there = _groups(names), _groups(others)
    found = {name: name for some in groups.values() for name in some}
    for key, some in groups.items():
        if len(some) == len(there[key]) > 1:
            for name, other in zip(some, there[key], strict=True):
                found[name] = "".join(chain(*zip_longest(_NUMBER.split(name), _NUMBER.findall(other), fillvalue="")))
    return found


def _groups(names: Iterable[str]) -> dict[tuple[int | str, ...], list[str]]:
    """Names that differ by their numbers alone, and by words of time and sides, in the order of the numbers."""
    groups = defaultdict[tuple[int | str, ...], list[str]](list)
    for name in sorted(names, key=lambda name: [int(number) for number in _NUMBER.findall(name)]):
        bare, numbers = _NUMBER.subn("#", name)
        groups[(numbers, *_bare(bare))].append(name)
    return groups


def most_alike(scores: Mapping[tuple[str, str], int], alone: bool = False) -> dict[str, str]:
    """Pairs of names that are more alike than every other pair that they rule out; of those that names say nothing of,
    the ones that rule out no other, where `alone`.
    """
    left, taken = dict(scores), dict[str, str]()
    while True:
        rivals = defaultdict[tuple[int, str], list[int]](list)
        for pair, how in left.items():
            for side in enumerate(pair):
                rivals[side].append(how)
        best = {side: (max(hows), hows.count(max(hows))) for side, hows in rivals.items()}
        now = {a: b for (a, b), how in left.items() if (how or alone) and best[0, a] == best[1, b] == (how, 1)}
        if not now:
            return taken
        taken |= now
        given, returned = {*taken}, {*taken.values()}
        left = {pair: how for pair, how in left.items() if pair[0] not in given and pair[1] not in returned}


def speaks_of(name: str, *words: str) -> bool:
    """Whether one of a name's words begins with one of these."""
    return any(part.startswith(words) for part in _words(name))


def _rest(words: list[str]) -> list[str]:
    """Words without those of time and sides."""
    return [word for word in words if word not in LATER | EARLIER | SIDES]


def _bare(name: str) -> list[str]:
    """A name's words without those of time and sides, and without "state" where anything else is left."""
    stem = _rest(words := _words(name)) or words
    return [word for word in stem if word not in ("state", "states")] or stem


def _same(stem: list[str], other: list[str]) -> bool:
    """Whether two names have one rest: as it stands, or but for one letter that stands for a side (h and hn)."""
    unlike = [(a, b) for a, b in zip(stem, other, strict=False) if a != b]
    alike = not unlike or (len(unlike) == 1 and _stem(unlike[0][0]) == _stem(unlike[0][1]))
    return bool(stem) and len(stem) == len(other) and alike


def _stem(word: str) -> str:
    """A word without a last letter that says where it stands: h0 and hn, hx and hy, r1i and r1o."""
    return word[:-1] if len(word) > 1 and word[0].isalpha() and word[-1] in "nxyio0t" else word


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
