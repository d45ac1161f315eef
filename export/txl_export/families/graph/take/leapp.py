"""A folder that LEAPP wrote, NVIDIA's exporter of policies: its ONNX files, their states, and what these start as.

Its YAML file says what each node takes and returns, and which output is which input of the next call. The first values
of these inputs lie in a safetensors file. To read that takes no LEAPP, and whether it fits the graph is not seen here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, MsgspecError, Struct, convert, field
from numpy.typing import NDArray
from txl_runtime.bundle.tensor_file import read_whole
from txl_runtime.errors import BackendError, CheckpointError, one_line, some
from txl_runtime.installing import pip_line

from txl_export.checkpoints.files.pickle_names import shown
from txl_export.regular import read_regular

MOST_BYTES, MOST_PARTS, DEEPEST, MOST_FILE_BYTES = 2**20, 2**16, 32, 2**31 - 1
"""Of YAML: bytes, parts with each counted wherever it is referred to, how many in one another. Of each other file."""
AGAIN = "export it again with LEAPP"


class _Tensor(Struct):
    name: str


class _Node(Struct):
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    parameters: dict[str, Any]


class _Configs(Struct):
    frequency: Annotated[float, Meta(gt=0, le=1e9)] | None = None


class _Pipeline(Struct):
    feedback_flow: dict[str, list[str]]
    initial_values: str = ""
    configs: _Configs = field(default_factory=_Configs)


class _Document(Struct):
    models: Annotated[dict[str, _Node], Meta(min_length=1)]
    pipeline: _Pipeline


@dataclasses.dataclass(frozen=True)
class Leapp:
    """One node of a folder, or a file alone.

    Attributes:
        path: its ONNX file.
        states: names of outputs by the inputs that they are in the next call.
        initial: arrays that these inputs are in the first call; empty, for zeros, where the folder has none.
        rate: calls a second; None where nobody said so.
    """

    path: Path
    states: dict[str, str] = dataclasses.field(default_factory=dict)
    initial: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    rate: float | None = None


def is_leapp(path: Path) -> bool:
    """Whether a path is one for `read_leapp`, by the first words of its YAML file; takes no package to tell."""
    return bool(_texts(path)[0])


def read_leapp(path: Path) -> Leapp:
    """One node of a folder that LEAPP 0.6 or 0.7 wrote.

    Args:
        path: of the folder or of its YAML file. Where that has several nodes, `:NODE` behind it takes one.

    Raises:
        BackendError: PyYAML is not installed.
        CheckpointError: there is no such node, or the files are damaged, too large, or do not fit together.
    """
    texts, name = _texts(path)
    if len(texts) != 1:
        found = f"{len(texts)} YAML files of LEAPP's with at most {MOST_BYTES} bytes"
        raise CheckpointError(f"{path}: {found}, expected one; give its path")
    ((table, text),) = texts.items()
    document = _read(table, text)
    nodes, flow = document.models, document.pipeline
    name = next(iter(nodes)) if len(nodes) == 1 and not name else name
    if name not in nodes:
        raise CheckpointError(f"{path}: has the nodes {some([*map(shown, nodes)])}, expected one of them: FOLDER:NODE")
    node, pairs = nodes[name], _pairs(table, nodes, flow.feedback_flow)
    returned = {f"{name}/{tensor.name}": tensor.name for tensor in node.outputs}
    sources = {tensor.name: pairs.get(f"{name}/{tensor.name}") for tensor in node.inputs}
    states = {given: returned[source] for given, source in sources.items() if source in returned}
    if {*states.values()} == {*returned.values()}:
        found = f"{table}: all that {shown(name)} returns is given to it again ({some([*states.values()])})"
        raise CheckpointError(f"{found}, expected an output beside; have LEAPP return it twice, as state and as output")
    initial = _first_values(table, flow.initial_values, name, states) if flow.initial_values else {}
    return Leapp(_graph(table, name, node), states, initial, flow.configs.frequency)


def _texts(path: Path) -> tuple[dict[Path, str], str]:
    """What begins as LEAPP's YAML files do, by their paths, and the node that is named behind a path, or ""."""
    (head, _, node), found = path.name.rpartition(":"), dict[Path, str]()
    with suppress(OSError):  # of a name that is too long
        path, node = (path.with_name(head), node) if head and not path.exists() else (path, "")
        if (path / "config.json").exists():  # a folder of Hugging Face's, which is not looked through
            return found, node
        for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
            with suppress(OSError, CheckpointError, UnicodeDecodeError):
                text = read_regular(file, MOST_BYTES).decode()
                found |= {file: text} if "\nmodels:" in f"\n{text}" else {}
    return found, node


def _read(table: Path, text: str) -> _Document:
    """What a YAML file says, as texts, lists and tables alone: whatever tags it has make nothing else."""
    try:
        import yaml  # an extra
    except ModuleNotFoundError:
        raise BackendError(f"{table}: to read it takes PyYAML, not installed here; {pip_line('leapp')}") from None
    loader, parts, sizes, around = getattr(yaml, "CBaseLoader", yaml.BaseLoader), 0, dict[str, int](), []
    try:
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.CollectionStartEvent):
                around.append((event.anchor, parts))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = around.pop()
                sizes[anchor] = parts - before
            parts += sizes.get(event.anchor, MOST_PARTS) if isinstance(event, yaml.AliasEvent) else 1
            if parts > MOST_PARTS or len(around) > DEEPEST:  # LEAPP refers to lists again, others to lists of lists
                raise ValueError(f"more than {MOST_PARTS} parts, or {DEEPEST} in one another, or one in itself")
        return convert(yaml.load(text, loader), _Document, strict=False)  # noqa: S506 - it makes no objects
    except (ValueError, MsgspecError, yaml.YAMLError) as error:
        raise CheckpointError(f"{table}: {shown(one_line(error))}; expected YAML of LEAPP's: {AGAIN}") from None


def _pairs(table: Path, nodes: dict[str, _Node], flow: dict[str, list[str]]) -> dict[str, str]:
    """Outputs by the inputs that they are in the next call, each as NODE/NAME."""
    outputs = {f"{name}/{tensor.name}" for name, node in nodes.items() for tensor in node.outputs}
    inputs = {f"{name}/{tensor.name}" for name, node in nodes.items() for tensor in node.inputs}
    found = dict[str, str]()
    for source, target in ((source, target) for source, targets in flow.items() for target in targets):
        if source not in outputs or target not in inputs or found.setdefault(target, source) != source:
            leads = f"{table}: leads {shown(source)} to {shown(target)}"
            raise CheckpointError(f"{leads}, expected one output of a node for an input of one; {AGAIN}")
    return found


def _graph(table: Path, name: str, node: _Node) -> Path:
    """The ONNX file of a node, which is the one that LEAPP wrote."""
    backend, named, expected = (str(node.parameters.get(key)) for key in ("backend", "model_path", "sha256sum"))
    if backend != "onnx":
        raise CheckpointError(f"{table}: {shown(name)} is saved as {shown(backend)}, expected onnx; {AGAIN} as that")
    file, sha256 = _beside(table, named, lambda data: hashlib.sha256(data).hexdigest())
    if sha256 != expected:
        raise CheckpointError(f"{file}: its SHA-256 is not the one in {table.name}, expected LEAPP's own file; {AGAIN}")
    return file


def _first_values(table: Path, named: str, name: str, states: Collection[str]) -> dict[str, NDArray[Any]]:
    """The arrays that the states start as, of which there are those of all of them or none."""
    file, arrays = _beside(table, named, lambda data: read_whole(io.BytesIO(data), len(data), MOST_BYTES)[1])
    if lacking := [state for state in states if f"{name}/{state}" not in arrays]:
        raise CheckpointError(f"{file}: nothing for {shown(f'{name}/{lacking[0]}')}, expected an array; {AGAIN}")
    return {state: arrays[f"{name}/{state}"] for state in states}


def _beside(table: Path, named: str, read: Callable[[bytes], Any]) -> tuple[Path, Any]:
    """A file that a YAML file names, which has to lie in its folder or below, wherever links lead; what is in it."""
    file, place = table.parent / named, os.path.realpath(table.parent)
    if not named.isprintable() or len(named) > 255 or not Path(os.path.realpath(file)).is_relative_to(place):
        raise CheckpointError(f"{table}: names {shown(named)}, expected a file in its folder; copy it there")
    try:
        return file, read(read_regular(file, MOST_FILE_BYTES))
    except (CheckpointError, OSError, ValueError, MsgspecError, RecursionError) as error:
        found = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(f"{file}: {found}; expected the file that LEAPP wrote: copy it again") from None
