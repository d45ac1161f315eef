"""Finds points of the residual stream in a graph and in the reference, where `bisecting` compares both.

There are two points per layer, after its attention and after its feed-forward part: `layers.00.attention`,
`layers.00.feed_forward`, … In a graph, points are found by the layer norms next to them, whose weights keep their
names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import BundleError

from txl_export.families.transformer_xl.paper_model import Memory, PaperModel
from txl_export.families.transformer_xl.weights import layer_name


def segment_of(bundle: Bundle) -> Program:
    """Return the program to bisect: a program with the longest segments, preferably a rolled program."""
    held = [program for program in bundle.manifest.programs if program.kind in ("logprobs", "hidden")]
    longest = max(program.segment_length for program in held)
    fitting = [program for program in held if program.segment_length == longest]
    return next((program for program in fitting if program.update == "rolled"), fitting[0])


def mark(bundle: Bundle, program: Program) -> tuple[bytes, dict[str, str]]:
    """Return a program's graph with the points as additional outputs, and each point's output name.

    Raises:
        BundleError: the graph lacks a layer norm of the config's layers.
    """
    path, config = bundle.file(program.file), bundle.manifest.config
    model = onnx.load_model_from_string(path.read_bytes())
    norms = {_norm_name(node): node for node in model.graph.node if node.op_type == "LayerNormalization"}
    names: dict[str, str] = {}
    for i in range(config.n_layer):
        attention, feed_forward = f"{layer_name(i)}.attention", f"{layer_name(i)}.feed_forward"
        try:
            if config.pre_lnorm:
                names[attention] = str(norms[f"{feed_forward}.norm"].input[0])
                names[feed_forward] = _end_of_layer(model, names[attention], str(path))
            else:
                names[attention] = norms[f"{attention}.norm"].output[0]
                names[feed_forward] = norms[f"{feed_forward}.norm"].output[0]
        except KeyError as missing:
            raise BundleError(f"{path}: has no layer norm of {missing}, expected one; export the model again") from None
    for name in names.values():
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model.SerializeToString(), names


def _norm_name(node: onnx.NodeProto) -> str:
    """Return a layer norm's name, e.g. "layers.00.attention.norm" for the scale "layers/00/attention/norm.weight"."""
    return str(node.input[1]).replace("/", ".").removesuffix(".weight")


def _end_of_layer(model: onnx.ModelProto, before: str, source: str) -> str:
    """Return the output of a pre-norm layer: the result of the only Add that reads `before`."""
    sums = [node for node in model.graph.node if node.op_type == "Add" and before in node.input]
    if len(sums) != 1:
        raise BundleError(f"{source}: adds to {before} {len(sums)} times, expected once; export the model again")
    return str(sums[0].output[0])


def traced(
    reference: PaperModel, tokens: Tensor, memory: Sequence[Tensor]
) -> tuple[dict[str, NDArray[np.float64]], Memory]:
    """Run a segment of the reference; return the residual stream at each point, and the memory after the segment.

    For example, tokens [2, 5] give [2, 5, 32] at each point.
    """
    noting = _Noting(reference)
    _, after = noting.hidden(tokens, memory)
    return noting.seen, after


class _Noting(PaperModel):
    """A reference that records the residual stream after each part of its layers, in `seen`."""

    def __init__(self, reference: PaperModel) -> None:
        self.__dict__.update(reference.__dict__)
        self.seen: dict[str, NDArray[np.float64]] = {}

    def _layer(self, i: int, hidden: torch.Tensor, remembered: torch.Tensor) -> torch.Tensor:
        result = super()._layer(i, hidden, remembered)
        self.seen[f"{layer_name(i)}.feed_forward"] = result.double().numpy()
        return result

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        result = super()._norm(name, x)
        layer, _, part = name.removesuffix(".norm").rpartition(".")
        if self.config.pre_lnorm and part == "feed_forward":
            self.seen[f"{layer}.attention"] = x.double().numpy()
        elif not self.config.pre_lnorm and part == "attention":
            self.seen[f"{layer}.attention"] = result.double().numpy()
        return result
