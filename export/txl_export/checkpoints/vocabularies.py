"""Vocabularies of the code bases, as a bundle's plain JSON (see `txl_runtime.bundle.vocabulary`).

The word vocabulary of kimiyoung's, NVIDIA's and Hugging Face's code is one class: a list of symbols, how lines are
split, and a symbol for line ends. Pickled ones are read without executing anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from txl_runtime.bundle.vocabulary import Words, decode_vocabulary, split_lines
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.loading import load_plain
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.checkpoints.files.regular import read_regular
from txl_export.checkpoints.files.unpickling import PROGRAM_LIMIT


def word_vocabulary(attributes: Mapping[str, Any], source: str) -> bytes:
    """Bundle JSON from the attributes of a `Vocab` object.

    Raises:
        CheckpointError: there is no list of symbols in it.
    """
    symbols = attributes.get("idx2sym")
    if not isinstance(symbols, list) or not symbols or not all(isinstance(symbol, str) for symbol in symbols):
        raise CheckpointError(f"{source}: the vocabulary has no list of symbols (idx2sym), expected one; give --tokens")
    unknown = attributes.get("unk_idx", attributes.get("UNK_idx"))
    if type(unknown) is not int or not 0 <= unknown < len(symbols):
        unknown = next((symbols.index(name) for name in ("<unk>", "<UNK>") if name in symbols), None)
    delimiter = attributes.get("delimiter")
    # lm1b's sentences stand between two <S>; the others' lines end in <eos>; enwik8 and text8 have neither.
    start = symbols.index("<S>") if "<S>" in symbols and "<eos>" not in symbols else None
    end = symbols.index("<eos>") if "<eos>" in symbols else start
    lower_case = attributes.get("lower_case")
    words = Words(
        symbols=tuple(symbols),
        unknown=unknown,
        line_start=start,
        line_end=end,
        lower_case=isinstance(lower_case, int) and bool(lower_case),
        delimiter=delimiter if isinstance(delimiter, str) else None,
    )
    try:
        return msgspec.json.encode(words)
    except UnicodeError:
        raise CheckpointError(f"{source}: the vocabulary has symbols that are no Unicode text; give --tokens") from None


def boundary_of(vocabulary: bytes, vocab_size: int) -> int | None:
    """The id of the token that separates texts, where a bundle's vocabulary (its JSON) has one: the end of a line.

    Raises:
        BundleError: it is no vocabulary of this many ids.
    """
    words = decode_vocabulary(vocabulary, vocab_size, "the vocabulary")
    if not isinstance(words, Words):
        return None
    marks = [mark for mark in (words.line_end, words.line_start) if mark is not None]
    return marks[0] if marks else words.symbols.index("<eos>") if "<eos>" in words.symbols else None


def read_vocabulary_file(path: Path) -> bytes:
    """Bundle JSON from a file: our own .json, one symbol per line in .txt, or a pickled vocabulary or corpus.

    Raises:
        CheckpointError: it is none of these.
    """
    if path.suffix in (".json", ".txt"):
        try:
            data = read_regular(path, PROGRAM_LIMIT)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}, expected a vocabulary; check the path") from None
        if path.suffix == ".json":
            return data
        try:
            symbols = split_lines(data.decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: {error}, expected one symbol per line; check the file") from None
        return word_vocabulary({"idx2sym": [line.split(" ")[0] for line in symbols if line]}, str(path))
    content = load_plain(path)
    if isinstance(content, Stub):
        content = content.state
    if isinstance(content, Mapping) and isinstance(content.get("vocab"), Stub):
        content = content["vocab"].state  # a whole corpus (cache.pt)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a vocabulary; check the file")
    return word_vocabulary(content, str(path))
