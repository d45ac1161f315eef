"""Checkpoints: one importer per family, all ending in one canonical config and state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from torch import Tensor
from txl_runtime.errors import CheckpointError, UsageError

from txl_export.checkpoints import cntxl, fastai, hf, kimiyoung, nvidia, remixl, txl
from txl_export.checkpoints.imported import Family, Imported, Unwrapped
from txl_export.checkpoints.loading import Stub, load_file

__all__ = ["FAMILIES", "Source", "read_checkpoint", "read_config"]

MODULES: tuple[ModuleType, ...] = (txl, kimiyoung, nvidia, hf, remixl, fastai, cntxl)
FAMILIES = {module.NAME: Family(module.recognise, module.from_state, module.unwrap) for module in MODULES}


# Buffers that are computed anew, and what some files keep twice.
WITHOUT_MEANING = re.compile(
    r"(^|\.)(inv_freq|freq)$|^crit\.shared_out_projs\.|^transformer\.r_[wr]_bias$|^(loss|criterion)\."
)


class _Accounted(Mapping[str, Tensor]):
    """A state that knows which of its tensors were asked for: what an importer leaves out is not the model."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._state[name]
        self.used.add(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


class Source(msgspec.Struct, frozen=True):
    """Where a model came from, for the manifest."""

    name: str
    sha256: str | None
    container: str
    recognised: str = ""


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file of config values.

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
    checkpoint: str | Path | Mapping[str, Any],
    family: str = "auto",
    config: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> tuple[Imported, Source]:
    """A checkpoint in canonical form, from a file, from a Hugging Face folder, or from a state dict in memory.

    Args:
        checkpoint: file, folder or mapping.
        family: the code base; "auto" recognises it.
        config: values under the family's own names; they come before those in the file.
        aliases: classes of forks in a pickled module, and the original's they stand for.

    Raises:
        CheckpointError: it cannot be read as a Transformer-XL.
        UsageError: an unknown family, or a config that is needed and was not given.
    """
    if family != "auto" and family not in FAMILIES:
        raise UsageError(f"family is {family!r}, expected auto, {', '.join(FAMILIES)}; check --family")
    if isinstance(checkpoint, Mapping):
        source, name = Source("state dict", None, "memory"), "the state"
        content: Any = checkpoint
    else:
        name = str(checkpoint)
        if Path(checkpoint).is_dir():
            content, loaded = hf.read_folder(Path(checkpoint))
        else:
            loaded = load_file(Path(checkpoint), aliases)
            content = loaded.content
        source = Source(Path(checkpoint).name, loaded.sha256, loaded.container)
    found, unwrapped = _unwrap(content, family, name)
    if not isinstance(unwrapped.config, Mapping | None):
        raise CheckpointError(
            f"{name}: its config is a {type(unwrapped.config).__name__}, expected a mapping; give --config"
        )
    values = {**(unwrapped.config or {}), **(config or {})}
    if not values:
        raise UsageError(f"{name}: a bare state dict of family {found} does not say its sizes; give --config FILE.json")
    state = _Accounted(unwrapped.state)
    imported = FAMILIES[found].from_state(state, values, name)
    if unused := sorted(key for key in set(state) - state.used if not WITHOUT_MEANING.search(key)):
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise CheckpointError(
            f"{name}: {', '.join(unused[:3])}{more} not expected in a {found} model of this config, which would leave "
            "them out; check n_layer, cutoffs and --family against the code that trained it"
        )
    imported = replace(imported, vocabulary=unwrapped.vocabulary, notes=(*unwrapped.notes, *imported.notes))
    return imported, msgspec.structs.replace(source, recognised=f"{found}: {unwrapped.reason}")


def _unwrap(content: Any, family: str, source: str) -> tuple[str, Unwrapped]:
    """The family and its tensors: from a file of its own making, else from the names of a bare state dict."""
    if isinstance(content, Unwrapped):
        if family not in ("auto", hf.NAME):
            raise UsageError(
                f"{source}: is a folder, expected of family {hf.NAME}, not {family}; name a checkpoint file"
            )
        return hf.NAME, replace(content, state=_tensors(content.state, source))
    asked = FAMILIES if family == "auto" else {family: FAMILIES[family]}
    for name, candidate in asked.items():
        unwrapped = candidate.unwrap(content, source)
        if unwrapped is not None:
            return name, replace(unwrapped, state=_tensors(unwrapped.state, source))
    if family != "auto":
        for name, candidate in FAMILIES.items():
            if candidate.unwrap(content, source) is not None:
                raise UsageError(f"{source}: is of family {name}, --family says {family}; leave it out")
    state = _tensors(_inner(content), source)
    matching = [name for name, candidate in FAMILIES.items() if candidate.recognise(state)]
    if family == "auto" and len(matching) != 1:
        raise CheckpointError(
            f"{source}: its {len(state)} tensors ({', '.join(sorted(state)[:3])} …) fit "
            f"{' and '.join(matching) or 'no known family'}, expected one; give --family"
        )
    return matching[0] if family == "auto" else family, Unwrapped(state, None, "the tensors' names")


def _inner(content: Any) -> Any:
    """The state dict in a training checkpoint whose other entries say nothing of the model."""
    if isinstance(content, Mapping):
        for key in ("state_dict", "model_state_dict", "model_state", "model"):
            if isinstance(content.get(key), Mapping):
                return content[key]
    return content


def _tensors(content: Any, source: str) -> dict[str, Tensor]:
    """A mapping of nothing but tensors, without the prefix that models for several devices leave."""
    if not isinstance(content, Mapping):
        kind = content.class_name if isinstance(content, Stub) else type(content).__name__
        raise CheckpointError(
            f"{source}: holds a {kind}, expected a state dict or a known checkpoint; save one of them"
        )
    strange = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if strange or not content:
        found = f"entries such as {', '.join(strange[:3])}" if strange else "nothing"
        raise CheckpointError(f"{source}: holds {found}, expected a state dict or a known checkpoint; save one of them")
    state = {str(name): tensor for name, tensor in content.items()}
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state
