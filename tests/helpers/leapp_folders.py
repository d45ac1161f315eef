"""Folders as LEAPP 0.7.2 writes them, made by hand: a right one, one with two nodes, and one that goes wrong later.

`tests/export/families/graph/take/test_leapp.py` has LEAPP itself write the same, where it is installed: the same text
but for sums and versions, and graphs that compute the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from safetensors.numpy import save_file
from small_graphs import model, value
from torch import nn

D, H, A = 6, 4, 3
JOINTS = ("hip", "knee", "foot")


class Port(NamedTuple):
    """An input or output of a node, with what else LEAPP says of it, in the lines of its YAML."""

    name: str
    shape: tuple[int, ...]
    more: tuple[str, ...] = ()


class Node(NamedTuple):
    """A node: its ONNX file, what it takes and what it returns."""

    model: bytes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


OBSERVED = Port("obs", (1, D), ("kind: state/joint/position",))
ACTED = Port("actions", (1, A), ("kind: target/joint/position", f"element_names: [[{', '.join(JOINTS)}]]"))
CARRIED = tuple(Port(f"{name}_{side}", (1, 1, H)) for side in ("in", "out") for name in ("h", "c"))


def layers() -> tuple[nn.LSTM, nn.Linear]:
    """The layers of the policy: always the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.LSTM(D, H), nn.Linear(H, A)


def first_values() -> dict[str, NDArray[Any]]:
    """Return the initial h and c: not zeros."""
    return {"h": np.full((1, 1, H), 0.25, np.float32), "c": np.full((1, 1, H), -0.5, np.float32)}


def policy(swapped: bool = False) -> Node:
    """A policy with an LSTM; swapped: what it returns as h is the new c, and the other way round."""
    lstm, head = layers()

    def rows(tensor: torch.Tensor) -> NDArray[Any]:
        i, f, g, o = tensor.detach().numpy().reshape(4, H, -1)  # in torch's order
        return np.concatenate([i, o, f, g])[None]

    bias = np.concatenate([rows(lstm.bias_ih_l0), rows(lstm.bias_hh_l0)], 1)[..., 0]
    weights = {"W": rows(lstm.weight_ih_l0), "R": rows(lstm.weight_hh_l0), "B": bias, "first": np.zeros(1, np.int64)}
    weights |= {"M": head.weight.detach().numpy(), "b": head.bias.detach().numpy()}
    h, c = ("new_c", "new_h") if swapped else ("new_h", "new_c")
    nodes = [
        helper.make_node("Unsqueeze", ["obs", "first"], ["x"]),
        helper.make_node("LSTM", ["x", "W", "R", "B", "", "h_in", "c_in"], ["", "new_h", "new_c"], hidden_size=H),
        helper.make_node("Squeeze", ["new_h", "first"], ["y"]),
        helper.make_node("Gemm", ["y", "M", "b"], ["actions"], transB=1),
        helper.make_node("Identity", [h], ["h_out"]),
        helper.make_node("Identity", [c], ["c_out"]),
    ]
    inputs, outputs = (OBSERVED, *CARRIED[:2]), (ACTED, *CARRIED[2:])
    return Node(_model(nodes, inputs, outputs, weights), inputs, outputs)


def right(folder: Path) -> Path:
    """The policy, made as it should be."""
    return written(folder, {"policy": policy()}, _fed_back("policy", "h", "c"), initial=_of_policy(), rate=50.0)


def wrong_from_second_step(folder: Path) -> Path:
    """The policy with h and c exchanged where they are returned: the first step is right, all later ones are wrong.

    Whoever annotates `update_state("policy", {"h": c, "c": h})` gets it, and LEAPP's own validation passes: it gives
    each graph the states that the traced code carried, and not those that the graph returned.
    """
    return written(folder, {"policy": policy(True)}, _fed_back("policy", "h", "c"), initial=_of_policy(), rate=50.0)


def two_nodes(folder: Path) -> Path:
    """An encoder whose features a policy with a state reads, and which is given the policy's last actions."""
    ports = {name: Port(name, (1, H)) for name in ("obs", "last", "features", "memory_in", "actions", "memory_out")}
    add, encoder = helper.make_node("Add", ["obs", "last"], ["features"]), ("obs", "last", "features")
    after = [helper.make_node("Add", ["features", "memory_in"], [name]) for name in ("actions", "memory_out")]
    first, second = [ports[name] for name in encoder], [ports[name] for name in ports if name not in encoder]
    nodes = {"encoder": Node(_model([add], first[:2], first[2:]), tuple(first[:2]), tuple(first[2:]))}
    given, returned = (ports["features"], second[0]), tuple(second[1:])
    nodes["policy"] = Node(_model(after, given, returned), given, returned)
    fed_back = {"policy/actions": "encoder/last", **_fed_back("policy", "memory")}
    initial = {name: np.zeros((1, H), np.float32) for name in ("encoder/last", "policy/memory_in")}
    return written(folder, nodes, fed_back, {"encoder/features": "policy/features"}, initial)


def written(
    folder: Path,
    nodes: Mapping[str, Node],
    fed_back: Mapping[str, str],
    forward: Mapping[str, str] | None = None,
    initial: Mapping[str, NDArray[Any]] | None = None,
    rate: float | None = None,
) -> Path:
    """A folder with its files; the text of the YAML file is LEAPP's to the letter.

    Args:
        folder: is made.
        nodes: by name.
        fed_back, forward: inputs by outputs, as NODE/NAME.
        initial: first values, by NODE/NAME.
        rate: in hertz.
    """
    folder.mkdir(parents=True)
    lines, given, returned = ["models:"], dict[str, list[str]](), dict[str, list[str]]()
    edges = {**(forward or {}), **fed_back}
    for name, node in nodes.items():
        (folder / f"{name}.onnx").write_bytes(node.model)
        lines += [f"  {name}:", "    inputs:", *_ports(node.inputs), "    outputs:", *_ports(node.outputs)]
        lines += ["    parameters:", f"      model_path: {name}.onnx", f"      md5sum: {_sum('md5', node.model)}"]
        lines += [f"      sha256sum: {_sum('sha256', node.model)}", "      backend: onnx", "      warp_segments: 0"]
        lines += ["      opset_version: 20"]
        given[name] = [port.name for port in node.inputs if f"{name}/{port.name}" not in edges.values()]
        returned[name] = [port.name for port in node.outputs if f"{name}/{port.name}" not in edges]
    lines += ["", "pipeline:", *(["  configs:", f"    frequency: {rate}"] if rate else [])]
    lines += _table("data_flow", {source: [target] for source, target in (forward or {}).items()})
    lines += _table("feedback_flow", {source: [target] for source, target in sorted(fed_back.items())})
    if initial:
        lines += [f"  initial_values: {folder.name}_initial_values.safetensors"]
        save_file(dict(initial), folder / f"{folder.name}_initial_values.safetensors")
    lines += _table("inputs", {name: names for name, names in given.items() if names})
    lines += _table("outputs", {name: names for name, names in returned.items() if names})
    lines += ["", "system information:", "  cuda version: None", "  leapp config version: '1.3'"]
    lines += ["  leapp version: 0.7.2", "  os: Debian GNU/Linux 12", "  python version: 3.11.7"]
    lines += ["  torch version: 2.13.0+cpu", "  warp version: null", "", ""]
    (folder / f"{folder.name}.yaml").write_text("\n".join(lines))
    return folder


def _of_policy() -> dict[str, NDArray[Any]]:
    return {f"policy/{name}_in": array for name, array in first_values().items()}


def _fed_back(node: str, *names: str) -> dict[str, str]:
    return {f"{node}/{name}_out": f"{node}/{name}_in" for name in names}


def _ports(ports: Sequence[Port]) -> list[str]:
    return [
        line
        for name, shape, more in ports
        for line in (
            f"    - name: {name}",
            "      dtype: float32",
            f"      shape: {list(shape)}",
            "      type: tensor",
            *(f"      {said}" for said in more),
        )
    ]


def _table(name: str, entries: Mapping[str, Sequence[str]]) -> list[str]:
    if not entries:
        return [f"  {name}: {{}}"]
    return [f"  {name}:", *(f"    {key}: [{', '.join(values)}]" for key, values in entries.items())]


def _model(
    nodes: Sequence[Any], inputs: Sequence[Port], outputs: Sequence[Port], weights: Mapping[str, Any] | None = None
) -> bytes:
    sides = [[value(port.name, port.shape) for port in ports] for ports in (inputs, outputs)]
    held = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    return bytes(model(nodes, *sides, held, opset=20).SerializeToString())


def _sum(kind: str, data: bytes) -> str:
    return hashlib.new(kind, data).hexdigest()
