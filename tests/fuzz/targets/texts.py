"""Texts that a user types or names: token ids, aliases, configs, folders of Hugging Face's, files of token ids."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import numpy as np
import torch
from safetensors.torch import save_file
from txl_export.checkpoints import read_config
from txl_export.checkpoints.hf import read_folder
from txl_export.token_files import read_tokens
from txl_runtime.streaming.checks import check_lengths, check_rows, check_tokens

from fuzz.choices import Choices
from fuzz.edits import VALUES, edited
from fuzz.targets.places import folder, written
from txl_deploy.commands.generate import _ids
from txl_deploy.commands.options import parse_aliases

CONFIG = {"model_type": "transfo-xl", "n_layer": 1, "vocab_size": 6, "cutoffs": [2, 4]}
LISTS = (0, 1, -1, 2, 3, 59, 60, 2**31, 2**63, -(2**63), 2**64, 1.5, True, None, "1", [], [1], [[1]], float("nan"))


def one_input(data: bytes) -> None:
    """One of the readers of short texts."""
    choices = Choices(data)
    choices.pick(READERS)(choices)


def seeds() -> Iterator[bytes]:
    """A good one of each."""
    for number in range(len(READERS)):
        for kind in range(8):
            yield bytes([number, kind, 2, kind, 3, kind * 5, 1, 4, 0, kind, 2, 2, 1])
    yield b"\0" + b"1,2,3"
    yield b"\1\1\7" + b"a.b=c.d"
    yield b"\2\0" + json.dumps(CONFIG).encode()
    file = io.BytesIO()
    np.save(file, np.arange(5))
    yield b"\4" + file.getvalue()


def _token_list(choices: Choices) -> None:
    ids = _ids(choices.rest().decode("utf-8", "surrogateescape"), "--prompt-tokens")
    assert ids.dtype == np.int32
    assert ids.ndim == 1


def _aliases(choices: Choices) -> None:
    found = parse_aliases([choices.text() for _ in range(choices.number(3))])
    assert all(name and target for name, target in found.items())


def _config(choices: Choices) -> None:
    text = choices.rest() if choices.number(1) == 0 else json.dumps(edited(CONFIG, choices)).encode()
    assert isinstance(read_config(written("config.json", text)), dict)


def _hugging_face(choices: Choices) -> None:
    """A folder whose config and vocabulary are changed."""
    path = folder() / "hf"
    path.mkdir(exist_ok=True)
    save_file({"a": torch.zeros(1)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(edited(CONFIG, choices, 3)), "utf-8")
    (path / "vocab.txt").write_bytes(choices.rest())
    unwrapped, _ = read_folder(path)
    assert all(isinstance(tensor, torch.Tensor) for tensor in unwrapped.state.values())


def _token_file(choices: Choices) -> None:
    ids = read_tokens(None, written("tokens.npy", choices.rest()), None, 60)
    assert ids is not None
    assert ids.dtype == np.int32
    assert len(ids) >= 2


def _arrays(choices: Choices) -> None:
    """Arguments of a stream's calls."""
    values = [choices.pick(LISTS) for _ in range(choices.number(4))]
    given = values if choices.flag() else [values] * choices.number(3)
    if choices.flag():
        given = choices.pick(VALUES)
    what: object = given
    if choices.flag():
        kind = choices.pick(("i4", "u8", "f4", "?", "U2", "O", "c8", "M8[s]", "V2", "i1"))
        what = np.zeros([choices.number(3) for _ in range(choices.number(3))], kind)
    match choices.number(2):
        case 0:
            ids, counts = check_tokens(what, 2, 60, choices.pick((None, what, [1, 0])))
            assert ids.dtype == counts.dtype == np.int32
            assert ids.shape[0] == 2
            assert ((ids >= 0) & (ids < 60)).all()
        case 1:
            counts = check_lengths(what, 2, 5)
            assert ((counts >= 0) & (counts <= 5)).all()
        case _:
            rows = check_rows(what, 3)
            assert ((rows >= 0) & (rows < 3)).all()


READERS: tuple[Callable[[Choices], None], ...] = (_token_list, _aliases, _config, _hugging_face, _token_file, _arrays)
