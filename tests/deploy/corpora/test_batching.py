"""Every document is in one batch, whatever its length, and few rows wait."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_deploy.corpora import batching
from txl_deploy.corpora.batching import batches, windows
from txl_deploy.corpora.documents import Unit

LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), max_size=60)


def unit(index: int, length: int) -> Unit:
    return Unit(index, f"d{index}", f"d{index}", length, np.zeros(length, np.int32).tobytes(), length)


def units(lengths: list[int]) -> Iterator[Unit]:
    return (unit(index, length) for index, length in enumerate(lengths))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 40), st.integers(1, 400))
def test_every_document_is_in_one_batch(lengths: list[int], rows: int, documents: int, tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"MOST_DOCUMENTS": documents, "ENOUGH_TOKENS": tokens, "MOST_TOKENS": 3 * tokens}.items():
            patched.setattr(batching, name, value)
        found = [list(batches(window, rows)) for window in windows(units(lengths), rows)]
    made = list(chain.from_iterable(found))
    assert sorted(each.index for batch in made for each in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= rows for batch in made)
    assert all(len(batch) == rows for window in found for batch in window[:-1]), "only a window's last batch is smaller"
    for window in found:
        in_order = [each.length for batch in window for each in batch]
        assert in_order == sorted(in_order, reverse=True)
        total = sum(in_order)
        assert total - in_order[0] < 3 * tokens, "one document more than fits, at most"
        assert len(in_order) <= max(documents, 4 * rows)


def test_padding_is_small() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 300, 4000).tolist()
    made = [batch for window in windows(units(lengths), 16) for batch in batches(window, 16)]
    computed = sum(len(batch) * batch[0].length for batch in made)
    in_order = sum(max(lengths[first : first + 16]) * 16 for first in range(0, 4000, 16))
    assert computed < 1.05 * sum(lengths) < 0.4 * in_order


def test_what_was_read_before_an_error_comes_first() -> None:
    def failing() -> Iterator[Unit]:
        yield from units([3, 1, 2])
        raise ValueError("a bad line")

    found = windows(failing(), 2)
    assert [each.index for each in next(found)] == [0, 1, 2]
    with pytest.raises(ValueError, match="a bad line"):
        next(found)
