"""Converts the code bases' vocabularies to a bundle's JSON (see `txl_runtime.bundle.vocabulary`).

The word vocabularies of kimiyoung's, NVIDIA's and Hugging Face's code have the same parts: a list of symbols, a
delimiter that splits lines, and a symbol for line ends. Pickled vocabularies are read without running code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import msgspec
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.vocabulary import Words, decode_vocabulary, split_lines
from txl_runtime.errors import CheckpointError, UsageError, some
from txl_runtime.listener import Listener

from txl_export.checkpoints.files.containers import MOST
from txl_export.checkpoints.files.loading import load_file
from txl_export.checkpoints.files.pickle_names import Stub
from txl_export.options import ExportOptions
from txl_export.regular import read_regular


def word_vocabulary(attributes: Mapping[str, Any], source: str) -> bytes:
    """Return bundle JSON from the attributes of a `Vocab` object.

    Raises:
        CheckpointError: there is no list of symbols, or a symbol is no Unicode text.
    """
    symbols = attributes.get("idx2sym")
    if not isinstance(symbols, list) or not symbols or not all(isinstance(symbol, str) for symbol in symbols):
        raise CheckpointError(f"{source}: the vocabulary has no list of symbols (idx2sym), expected one; give --tokens")
    marks, unknown = _marks(symbols), attributes.get("unk_idx", attributes.get("UNK_idx"))
    if type(unknown) is int and 0 <= unknown < len(symbols):
        marks["unknown"] = unknown
    delimiter, lower_case = attributes.get("delimiter"), attributes.get("lower_case")
    words = Words(
        symbols=tuple(symbols),
        **marks,
        lower_case=isinstance(lower_case, int) and bool(lower_case),
        delimiter=delimiter if isinstance(delimiter, str) else None,
    )
    try:
        return msgspec.json.encode(words)
    except UnicodeError:
        raise CheckpointError(f"{source}: the vocabulary has symbols that are no Unicode text; give --tokens") from None


def _marks(symbols: Sequence[str]) -> dict[str, int | None]:
    """Return the ids of the symbols that mean "unknown", "line_start" and "line_end"; None for a missing symbol."""
    unknown = next((symbols.index(name) for name in ("<unk>", "<UNK>") if name in symbols), None)
    # lm1b puts <S> before and after each sentence; other corpora end lines with <eos>; enwik8 and text8 have neither.
    end = symbols.index("<eos>") if "<eos>" in symbols else None
    start = symbols.index("<S>") if "<S>" in symbols and end is None else None
    return {"unknown": unknown, "line_start": start, "line_end": start if end is None else end}


def completed(vocabulary: bytes | None, tokens: int, options: ExportOptions, source: str) -> bytes | None:
    """Return a vocabulary with a word for each of the model's tokens; add missing words if the options ask for it.

    For example, a list has 119 words for 120 tokens: with specials "<S>", id 0 is `<S>` and id 1 the list's first word;
    with missing_words, id 119 has no word. Only the user knows which is right, and a wrong guess shifts every word by
    one id.

    Raises:
        TxlError: the vocabulary is not this model's, or the options do not make up the difference.
    """
    front = () if options.specials is None else tuple(options.specials.split(","))
    words = None if vocabulary is None else decode_vocabulary(vocabulary, tokens, source)
    if not isinstance(words, Words) or len(words) == tokens:
        if front or options.missing_words:
            raise UsageError("--specials and --missing-words are for a list that lacks words; leave them out")
        return vocabulary
    lacks, option = tokens - len(words), f" and --specials {len(front)}" * bool(front)
    if len(front) > lacks or (len(front) == lacks) == options.missing_words:
        raise UsageError(
            f"{source}: has {len(words)} words{option}, the model {tokens} tokens, expected a word for each; "
            f"give either --specials '<S>,…', where the list lacks {lacks} in front, or --missing-words, where it lacks"
            " the last ones: with the wrong one every word means its neighbour"
        )
    if twice := [word for number, word in enumerate(front) if word in ("", *front[:number], *words.symbols)]:
        raise UsageError(f"--specials has {twice[0]!r}, expected words that the list lacks, each once; check it")
    return msgspec.json.encode(_behind(front, words))


def _behind(front: tuple[str, ...], words: Words) -> Words:
    """Return a list of words with `front` put before it; the ids of its marks, e.g. <eos>, grow by len(front).

    If the list lacks a mark, e.g. `<S>` for the start and end of lines, the mark is looked for in `front`.
    """
    marks = _marks(front)
    own = {name: mark + len(front) for name in marks if (mark := getattr(words, name)) is not None}
    if "line_start" in own or "line_end" in own:
        marks = {"unknown": marks["unknown"]}
    return msgspec.structs.replace(words, symbols=(*front, *words.symbols), **marks | own)


def differences(bundle: Bundle, given: bytes, source: str, listener: Listener) -> list[str]:
    """List the differences between a bundle's vocabulary and `given`, e.g. "id 10: bundle 'w11', module 'w10'".

    If the export command in the manifest has --specials or --boundary-token, the words or the token that the option
    added are no difference: `listener` gets a warning instead.

    Raises:
        BundleError: `given`, the vocabulary of `source`, does not fit this model.
    """
    manifest, ours = bundle.manifest, bundle.vocabulary()
    theirs = decode_vocabulary(given, manifest.vocab_size, source)
    command = manifest.provenance.get("command")
    noted = command.get("arguments") if isinstance(command, Mapping) else None
    options = dict(pairwise(noted)) if isinstance(noted, list) and all(isinstance(one, str) for one in noted) else {}
    front = tuple(options["--specials"].split(",")) if "--specials" in options else ()
    if front and isinstance(theirs, Words) and len(front) + len(theirs) <= manifest.vocab_size:
        listener.warn(f"not compared: {some([*map(repr, front)])} in front of the words of the {source} (--specials)")
        theirs = _behind(front, theirs)
    own, other = msgspec.to_builtins(ours), msgspec.to_builtins(theirs)
    words = zip_longest(own.pop("symbols", ()), other.pop("symbols", ()))
    pairs = [("kind", own.pop("kind"), other.pop("kind"))]
    pairs += [(f"id {number}", *pair) for number, pair in enumerate(words)]
    pairs += [(name, value, other.get(name)) for name, value in own.items()]
    boundary, token = boundary_of(msgspec.json.encode(theirs), manifest.vocab_size), manifest.boundary_token
    if token != boundary and options.get("--boundary-token") == str(token):
        listener.warn(f"not compared: boundary token {token}, {boundary} by the {source} (--boundary-token)")
    else:
        pairs.append(("boundary_token", token, boundary))
    return [f"{place}: bundle {mine!r:.60}, {source} {their!r:.60}" for place, mine, their in pairs if mine != their]


def boundary_of(vocabulary: bytes, vocab_size: int) -> int | None:
    """Return the id of the token that separates texts in a vocabulary (bundle JSON): a line end or <eos>; else None.

    Raises:
        BundleError: the bytes are no vocabulary of `vocab_size` ids.
    """
    words = decode_vocabulary(vocabulary, vocab_size, "the vocabulary")
    if not isinstance(words, Words):
        return None
    marks = [mark for mark in (words.line_end, words.line_start) if mark is not None]
    return marks[0] if marks else words.symbols.index("<eos>") if "<eos>" in words.symbols else None


def read_vocabulary_file(path: Path) -> bytes:
    """Return the content of a vocabulary file as bundle JSON.

    A .json file has that form already, and a .txt file has one symbol per line. Any other file is a pickled vocabulary
    or corpus.

    Raises:
        CheckpointError: the file is none of these.
    """
    if path.suffix in (".json", ".txt"):
        try:
            data = read_regular(path, MOST)
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
    content = load_file(path).content
    if isinstance(content, Stub):
        content = content.state
    if isinstance(content, Mapping) and isinstance(content.get("vocab"), Stub):
        content = content["vocab"].state  # a pickled corpus (cache.pt), which holds its vocabulary
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a vocabulary; check the file")
    return word_vocabulary(content, str(path))
