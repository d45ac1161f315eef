"""One long text in parts that run beside each other, with the same result as from beginning to end.

A Transformer-XL's prediction depends on a bounded number of tokens before it: those in memory and segment, those that
their rows were computed from, and so on through the layers. A part whose memory is warmed up on so many tokens before
it starts from the memory that the whole run has there. Parts begin at the text's own cuts, multiples of L, because
where segments are cut is a part of the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import UsageError
from txl_runtime.types import Ids

from txl_deploy.corpora.documents import Unit


def warm_up(manifest: Manifest) -> int:
    """Tokens before a part after which its memory is that of the whole run: a multiple of L.

    Raises:
        UsageError: the manifest knows no such number, because the model is recurrent, compresses what it keeps, or is
            the user's own.
    """
    longest, reach = manifest.segment_lengths[0], manifest.reach
    if reach is None:
        raise UsageError(
            f"--parallel needs a model whose predictions depend on a bounded number of tokens, but the manifest of "
            f"this one ({manifest.family_name or 'unknown'}) names no reach, as of recurrent and compressing models; "
            "leave --parallel out, or score documents with --workers"
        )
    if manifest.family_name == "transformer_xl":  # manifests before 0.7 say too little where M is no multiple of L
        reach = max(reach, manifest.transformer_xl.reach(manifest.memory_length, longest))
    before = max(reach - longest, 0)
    return -(-before // longest) * longest


@dataclass(frozen=True)
class Parts:
    """A text's parts.

    Attributes:
        count: how many there are; fewer than asked for where the text has fewer segments.
        length: tokens of each but the last, a multiple of L.
        warm_up: tokens before each that only fill its memory.
        total: results in all, one fewer than tokens.
    """

    count: int
    length: int
    warm_up: int
    total: int

    @property
    def extra(self) -> int:
        """Tokens that are computed in addition."""
        return sum(min(self.warm_up, part * self.length) for part in range(1, self.count))

    def units(self, ids: Ids) -> Iterator[Unit]:
        """The parts of a text int32 [T], each with the tokens before it."""
        for part in range(self.count):
            first = part * self.length
            begin, end = max(first - self.warm_up, 0), min(first + self.length, self.total)
            data = ids[begin : end + 1].tobytes()
            name = f"part {part + 1}"
            yield Unit(part, name, name, end - first, data, end - first, skipped=first - begin)


def cut(results: int, parts: int, longest: int, warm: int) -> Parts:
    """Parts of a text with so many results, as even as multiples of the longest segment can be."""
    segments = -(-results // longest)
    length = -(-segments // parts) * longest
    return Parts(-(-results // length), length, warm, results)
