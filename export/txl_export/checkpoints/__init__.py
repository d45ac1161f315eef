"""Reads checkpoints with one importer per code base; all importers return the same canonical config and state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from txl_runtime.errors import CheckpointError, UsageError, some

from txl_export.checkpoints import cntxl, fastai, hf, kimiyoung, nvidia, remixl, txl
from txl_export.checkpoints.files.containers import SCRIPTED
from txl_export.checkpoints.files.loading import Loaded, load_file
from txl_export.checkpoints.files.pickle_names import CODE, Stub, known, shown
from txl_export.checkpoints.imported import CodeBase, Imported, ScriptedError, State, Unwrapped
from txl_export.checkpoints.modules import unscripted
from txl_export.checkpoints.overrides import Overrides, apply_overrides
from txl_export.tensorflow import refuse_tensorflow
from txl_export.token_files import regular

# remixl comes before kimiyoung: files of both are whole modules, and remixl refuses modules without its tensor names.
MODULES: tuple[CodeBase, ...] = (txl, remixl, kimiyoung, nvidia, hf, fastai, cntxl)
CODE_BASES = {module.NAME: module for module in MODULES}
PREFIXES = ("module.", "decoder.model.")
"""Prefixes that wrappers put before every tensor name: "module." by DataParallel, "decoder.model." by fairseq around a
Hugging Face model."""


# Tensors that an importer may leave unread: buffers that the model computes anew, and second copies in some files.
WITHOUT_MEANING = re.compile(
    r"(^|\.)(inv_freq|freq)$|^crit\.shared_out_projs\.|^transformer\.r_[wr]_bias$|^(loss|criterion)\."
)


class CheckpointSource(msgspec.Struct, frozen=True):
    """The origin of a model, for the manifest.

    Attributes:
        name: the name of the file or folder.
        sha256: the hash of the file; None for a state dict in memory.
        container: the format of the file.
        recognised: the code base, and the reason for it.
        overrides: dialect facts that the user gave; they replace the importer's.
        overridden: the importer's own values of those facts.
    """

    name: str
    sha256: str | None
    container: str
    recognised: str = ""
    overrides: Overrides | None = None
    overridden: dict[str, Any] = msgspec.field(default_factory=dict)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config values in a JSON file.

    Raises:
        UsageError: the file is missing or is not one JSON object.
    """
    try:
        values = msgspec.json.decode(regular(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}, expected a JSON file; check --config") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}; expected one JSON object; check --config") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds a {type(values).__name__}, expected one JSON object; check --config")
    return values


def read_checkpoint(
    checkpoint: str | Path | Mapping[str, Any],
    code_base: str = "auto",
    config: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    overrides: Overrides | None = None,
) -> tuple[Imported, CheckpointSource]:
    """Return a checkpoint in canonical form, from a file, a Hugging Face folder, or a state dict in memory.

    Args:
        checkpoint: file, folder or mapping.
        code_base: the code base; "auto" recognises it.
        config: values under the code base's own names; they override the file's values.
        aliases: the original class for each class name of a fork, e.g. {"modules.MemTransformerLM":
            "mem_transformer.MemTransformerLM"}.
        overrides: facts in which the checkpoint differs from other files of its code base.

    Raises:
        CheckpointError: the checkpoint cannot be read as a Transformer-XL; a TorchScript archive raises the subclass
            ScriptedError.
        UsageError: an unknown code base, or an override that does not apply; missing config values raise the subclass
            ConfigNeededError.
    """
    check_code_base(code_base)
    if isinstance(checkpoint, Mapping):
        source, name = CheckpointSource("state dict", None, "memory"), "the state"
        content: Any = checkpoint
    else:
        name = str(checkpoint)
        content, loaded = load(Path(checkpoint), aliases)
        source = CheckpointSource(Path(checkpoint).name, loaded.sha256, loaded.container)
    try:
        code, unwrapped = identify(content, code_base, name)
    except CheckpointError:
        if source.container == SCRIPTED:
            raise ScriptedError(scripted(name, content)) from None
        raise
    imported = import_model(code, unwrapped, config, name)
    imported, before = apply_overrides(imported, overrides or Overrides())
    recognised = f"{code}: {unwrapped.reason}"
    if code_base == "auto":
        imported = replace(imported, notes=(f"recognised as {recognised}", *imported.notes))
    return imported, msgspec.structs.replace(source, recognised=recognised, overrides=overrides, overridden=before)


def scripted(name: str, content: Mapping[str, Any]) -> str:
    """Return the message for a TorchScript archive whose tensors fit no known family."""
    return (
        f"{name}: this is a TorchScript archive, whose module is code that is not run here, and its {len(content)} "
        f"tensors fit no known family, expected a module of your own for them; complete what txl-deploy inspect {name} "
        f"--skeleton > FILE.py writes, and export FILE.py:build --weights {name}"
    )


def check_code_base(code_base: str) -> None:
    """Check the name of a code base.

    Raises:
        UsageError: the name is neither "auto" nor in CODE_BASES.
    """
    if code_base != "auto" and code_base not in CODE_BASES:
        raise UsageError(f"family is {code_base!r}, expected auto, {', '.join(CODE_BASES)}; check --family")


def load(path: Path, aliases: Mapping[str, str] | None = None) -> tuple[Any, Loaded]:
    """Return the content of a file or a Hugging Face folder, for `identify`, and the record of reading it.

    Raises:
        CheckpointError: the file cannot be read, or refers to unknown classes.
    """
    refuse_tensorflow(path)
    if path.is_dir():
        return hf.read_folder(path)
    loaded = load_file(path, aliases)
    unknown = {shown(name) for name in loaded.global_names if not (known(name) or name in (aliases or {}))}
    if loaded.container == SCRIPTED:
        unknown = {name for name in unknown if not name.startswith(CODE)}
    if unknown:
        raise CheckpointError(
            f"{path}: refers to {some(sorted(unknown), 20)}, not known here (nothing was imported or run); if these "
            "are a fork's names for known classes, say so (--alias modules.MemTransformerLM=mem_transformer."
            "MemTransformerLM, once each); otherwise load the file where it was trained and save model.state_dict()"
        )
    loaded = unscripted(path, loaded)
    return loaded.content, loaded


def import_model(code_base: str, unwrapped: Unwrapped, config: Mapping[str, Any] | None, name: str) -> Imported:
    """Convert the result of `identify` to canonical form; values in `config` override the file's.

    Raises:
        CheckpointError: the tensors are not those of a model of this code base.
        ConfigNeededError: a value is missing from the file and from `config`.
    """
    if not isinstance(unwrapped.config, Mapping | None):
        raise CheckpointError(
            f"{name}: its config is a {type(unwrapped.config).__name__}, expected a mapping; give --config"
        )
    values = {**(unwrapped.config or {}), **(config or {})}
    state = State(unwrapped.state, name)
    imported = CODE_BASES[code_base].from_state(state, values)
    if unused := sorted(key for key in set(state) - state.used if not WITHOUT_MEANING.search(key)):
        raise CheckpointError(
            f"{name}: {some([*map(shown, unused)])} not expected in a {code_base} model of this config, "
            "which would leave them out; check n_layer, cutoffs and --family against the code that trained it"
        )
    return replace(imported, vocabulary=unwrapped.vocabulary, notes=(*unwrapped.notes, *imported.notes))


def identify(content: Any, code_base: str, source: str) -> tuple[str, Unwrapped]:
    """Return the code base of a file's content and the content's parts.

    A file whose layout only one code base writes is recognised by it; a bare state dict by its tensor names.

    Raises:
        CheckpointError: no code base fits, or several do.
        UsageError: the file's layout belongs to a code base other than `code_base`.
    """
    for name in sorted(CODE_BASES, key=lambda name: name != code_base):  # the requested code base is tried first
        unwrapped = CODE_BASES[name].unwrap(content, source)
        if unwrapped is not None:
            if code_base not in ("auto", name):
                raise UsageError(f"{source}: is of family {name}, --family says {code_base}; leave it out")
            return name, replace(unwrapped, state=_tensors(unwrapped.state, source))
    state = _tensors(_inner(content), source)
    matching = code_bases_with_names(state)
    if code_base == "auto" and len(matching) != 1:
        raise CheckpointError(
            f"{source}: its {len(state)} tensors ({', '.join(map(shown, sorted(state)[:3]))} …) fit "
            f"{' and '.join(matching) or 'no known family'}, expected one; give --family"
        )
    code = matching[0] if code_base == "auto" else code_base
    reason = f"tensors named {' and '.join(CODE_BASES[code].MARKS)}" if code in matching else "--family alone"
    return code, Unwrapped(state, None, reason)


def code_bases_with_names(names: Iterable[str]) -> list[str]:
    """Return the code bases whose `MARKS` are all among these tensor names: exactly one for a known model."""
    return [name for name, code_base in CODE_BASES.items() if set(code_base.MARKS) <= set(names)]


def _inner(content: Any) -> Any:
    """Return the state dict inside a training checkpoint, e.g. its "model_state"; without one, the content."""
    if isinstance(content, Mapping):
        for key in ("state_dict", "model_state_dict", "model_state", "model", "module"):
            if isinstance(content.get(key), Mapping):
                return content[key]
    return content


def _tensors(content: Any, source: str) -> dict[str, Tensor]:
    """Return a mapping of tensors without the prefixes of wrappers; refuse a mapping with other values."""
    if not isinstance(content, Mapping):
        kind = shown(content.class_name) if isinstance(content, Stub) else type(content).__name__
        raise CheckpointError(
            f"{source}: holds a {kind}, expected a state dict or a known checkpoint; save one of them"
        )
    strange = [
        shown(name) if isinstance(name, str) else f"one named by a {type(name).__name__}"
        for name, value in content.items()
        if not (isinstance(value, Tensor) and isinstance(name, str))
    ]
    if odd := [name for name, value in content.items() if isinstance(value, Tensor) and not _has_values(value)]:
        raise CheckpointError(
            f"{source}: {shown(str(odd[0]))} is sparse, quantised or has no values, expected plain tensors; save those"
        )
    if strange or not content:
        contents = f"entries such as {', '.join(strange[:3])}" if strange else "nothing"
        raise CheckpointError(
            f"{source}: holds {contents}, expected a state dict or a known checkpoint; save one of them, or give the "
            "whole folder if it is a trainer's run"
        )
    state = dict(content)
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
