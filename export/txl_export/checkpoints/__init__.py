"""Checkpoints: one importer per family, all ending in one canonical config and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from txl_runtime.errors import CheckpointError, UsageError

from txl_export.checkpoints import hf, kimiyoung, txl
from txl_export.checkpoints.imported import Imported

__all__ = ["FAMILIES", "Source", "read_checkpoint", "read_config"]

Importer = Callable[[Mapping[str, Tensor], Mapping[str, Any], str], Imported]

FAMILIES: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Importer]] = {
    txl.NAME: (txl.recognise, txl.from_state),
    kimiyoung.NAME: (kimiyoung.recognise, kimiyoung.from_state),
    hf.NAME: (hf.recognise, hf.from_state),
}


class Source(msgspec.Struct, frozen=True):
    """Where a model came from, for the manifest."""

    name: str
    sha256: str | None
    container: str


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a --config file.

    Raises:
        UsageError: the file is missing or is not one JSON object.
    """
    try:
        values = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}, expected a JSON file; check --config") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; expected one JSON object; check --config") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds a {type(values).__name__}, expected one JSON object; check --config")
    return values


def read_checkpoint(
    checkpoint: str | Path | Mapping[str, Tensor], family: str = "auto", config: Mapping[str, Any] | None = None
) -> tuple[Imported, Source]:
    """A checkpoint in canonical form, from a file or from a state dict in memory.

    Raises:
        CheckpointError: it cannot be read as a Transformer-XL.
        UsageError: an unknown family, or a config that is needed and was not given.
    """
    if family != "auto" and family not in FAMILIES:
        raise UsageError(f"family is {family!r}, expected auto, {', '.join(FAMILIES)}; check --family")
    if isinstance(checkpoint, Mapping):
        return _from_mapping(checkpoint, family, config, "the state"), Source("state dict", None, "memory")
    from txl_export.checkpoints.loading import load_file

    loaded = load_file(Path(checkpoint))
    if not isinstance(loaded.content, Mapping):
        raise CheckpointError(f"{checkpoint}: holds a {type(loaded.content).__name__}, expected a checkpoint mapping")
    imported = _from_mapping(loaded.content, family, config, str(checkpoint))
    return imported, Source(Path(checkpoint).name, loaded.sha256, loaded.container)


def _from_mapping(content: Mapping[str, Any], family: str, config: Mapping[str, Any] | None, source: str) -> Imported:
    if content.get("format") == txl.FORMAT:
        if family not in ("auto", txl.NAME):
            raise UsageError(f"{source}: is of family {txl.NAME}, --family says {family}; leave it out")
        if config:
            content = {**content, "config": {**content.get("config", {}), **config}}
        return txl.from_checkpoint(content, source)
    strange = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if strange or not content:
        found = f"entries such as {', '.join(strange[:3])}" if strange else "nothing"
        raise CheckpointError(
            f"{source}: holds {found}, expected a state dict or a known checkpoint; see docs/checkpoints.md"
        )
    state: dict[str, Tensor] = {str(name): tensor for name, tensor in content.items()}
    matching = [name for name, (recognise, _) in FAMILIES.items() if recognise(state)]
    if family == "auto" and len(matching) != 1:
        raise CheckpointError(
            f"{source}: its {len(state)} tensors ({', '.join(sorted(state)[:3])} …) fit "
            f"{' and '.join(matching) or 'no known family'}, expected one; give --family"
        )
    chosen = matching[0] if family == "auto" else family
    if config is None:
        raise UsageError(
            f"{source}: a bare state dict of family {chosen} says nothing of its sizes; give --config FILE.json"
        )
    return FAMILIES[chosen][1](state, config, source)
