"""Graphs that keep nothing from call to call, most with an input and an output of one shape: inspect finds no state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .modules import Step


class Graph(NamedTuple):
    given: str
    """Inputs and their sizes; whole numbers below the one behind `<`, and bools where it is 2."""
    returned: str
    call: Callable[..., Any]
    layers: Callable[[], dict[str, Any]] = dict
    dynamo: int = 0
    open: str = ""
    """Names and axes that are open."""


def export(graph: Graph, file: Path) -> Path:
    """Write the file of a graph."""
    names, example = [], []
    with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PyTorch says of its own exporter
        torch.manual_seed(7)
        for part in graph.given.split(";"):
            name, *words = part.split()
            below = next((int(word[1:]) for word in words if word[0] == "<"), 0)
            sizes = [int(word) for word in words if word[0] != "<"]
            whole = torch.randint(0, below or 1, sizes)
            names.append(name)
            example.append(torch.rand(sizes) if not below else whole.bool() if below == 2 else whole)
        options: dict[str, Any] = {"opset_version": graph.dynamo or 17, "dynamo": bool(graph.dynamo)}
        if graph.dynamo:
            options |= {"external_data": False, "verbose": False}
        else:
            axes = [part.split() for part in graph.open.split(";") if part]
            options["dynamic_axes"] = {name: {int(axis): f"{name}_{axis}"} for name, axis in axes}
        module = Step(graph.call, graph.layers()).eval()
        names_of = {"input_names": names, "output_names": graph.returned.split()}
        torch.onnx.export(module, tuple(example), str(file), **names_of, **options)
    return file


def lines(*sizes: int, **more: tuple[int, int]) -> Callable[[], dict[str, Any]]:
    """Linear layers: `a` of these sizes, and more by name."""
    return lambda: {name: nn.Linear(*size) for name, size in {"a": sizes, **more}.items()}


def u_net(m, x):
    a = torch.relu(m.a(x))
    b = F.interpolate(torch.relu(m.b(F.max_pool2d(a, 2))), scale_factor=2)
    return torch.sigmoid(m.c(torch.cat([a, b], 1)))


def rotary(m, q, k, positions):
    angle = positions[:, None] * torch.tensor([1.0, 0.1, 0.01])
    cos, sin = angle.cos(), angle.sin()
    return tuple(
        torch.cat([v[..., :3] * cos - v[..., 3:] * sin, v[..., 3:] * cos + v[..., :3] * sin], -1) for v in (q, k)
    )


def style(m, content, style):
    (a, b), (c, d) = ((x.mean((2, 3), True), x.std((2, 3), keepdim=True)) for x in (content, style))
    return (content - a) / (b + 1e-5) * d + c


def attention(m, x, mask):
    query, key, value = m.a(F.layer_norm(x, (8,))).chunk(3, -1)
    return x + (query @ key.transpose(1, 2) + mask[:, : x.shape[1], : x.shape[1]]).softmax(-1) @ value


def highway(m, x):
    keep = torch.sigmoid(m.a(x))
    return keep * x + (1 - keep) * torch.tanh(m.b(x))


def gtrxl_gate(m, x, y):
    update, reset = torch.sigmoid(m.a(torch.cat([x, y], -1))).chunk(2, -1)
    return (1 - update) * x + update * torch.tanh(m.b(torch.cat([reset * x, y], -1)))


def fusion(m, camera, lidar):
    gate = torch.sigmoid(m.a(torch.cat([camera, lidar], -1)))
    return gate * camera + (1 - gate) * lidar


def conditioned(m, x, t, context):
    mixed = F.scaled_dot_product_attention(m.a(x.flatten(2).transpose(1, 2)), context, context) + t[:, None, None]
    return m.b(mixed).transpose(1, 2).unflatten(2, (8, 8))


def encoder() -> dict[str, Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return {"net": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)}


def convolutions(*sizes: tuple[int, int]) -> Callable[[], dict[str, Any]]:
    return lambda: {name: nn.Conv2d(*size, 3, padding=1) for name, size in zip("abc", sizes, strict=False)}


def classes() -> dict[str, Any]:
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    return {"net": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *pooled)}


STATELESS = {
    "denoiser": Graph(
        "noisy 2 3 8 8",
        "denoised",
        lambda m, x: x - m.b(torch.relu(m.a(x))),
        convolutions((3, 6), (6, 3)),
        open="noisy 0",
    ),
    "residual_block": Graph("x 2 8", "out", lambda m, x: x + m.b(torch.relu(m.a(x))), lines(8, 9, b=(9, 8)), dynamo=18),
    "sequence_encoder": Graph(
        "tokens 2 5 <20",
        "encoded last",
        lambda m, tokens: m.gru(m.table(tokens)),
        lambda: {"table": nn.Embedding(20, 6), "gru": nn.GRU(6, 6, batch_first=True)},
    ),
    "u_net": Graph("image 1 1 16 16", "mask", u_net, convolutions((1, 4), (4, 4), (8, 1))),
    "classifier": Graph("image 2 3 16 16", "probabilities", lambda m, x: m.net(x).softmax(-1), classes, open="image 0"),
    "transformer_encoder": Graph(
        "x 2 5 8; mask 2 5 <2", "hidden", lambda m, x, k: m.net(x, src_key_padding_mask=k & False), encoder, dynamo=18
    ),
    "block_of_a_split_model": Graph(
        "hidden_states 1 5 8; mask 1 5 5", "hidden_states_out", attention, lines(8, 24), open="hidden_states 1"
    ),
    "lstm_of_both_directions": Graph(
        "x 2 6 8", "y", lambda m, x: m.net(x)[0], lambda: {"net": nn.LSTM(8, 4, batch_first=True, bidirectional=True)}
    ),
    "embedding": Graph(
        "ids 2 4 <30", "vectors", lambda m, ids: m.a(ids), lambda: {"a": nn.Embedding(30, 4)}, dynamo=18
    ),
    "two_of_one_shape": Graph(
        "left 2 4; right 2 4", "left_out right_out", lambda m, a, b: (m.a(a) + b, m.b(b) * a), lines(4, 4, b=(4, 4))
    ),
    "diffusion_step": Graph(
        "x_t 2 1 8 8; t 2 <9", "x_prev", lambda m, x, t: x - m.a(x) * t[:, None, None, None] / 10, convolutions((1, 1))
    ),
    "conditioned_denoiser": Graph(
        "sample 1 4 8 8; step 1 <9; context 1 6 8", "noise", conditioned, lines(4, 8, b=(8, 4))
    ),
    "rotary_positions": Graph("q 2 4 6; k 2 4 6; positions 4 <9", "q_out k_out", rotary),
    "style_transfer": Graph("content 1 3 8 8; style 1 3 8 8", "image_out", style),
    "graph_convolution": Graph(
        "x 2 6; h 2 6", "h_out", lambda m, x, h: torch.relu(m.a(x) + m.b(h)), lines(6, 6, b=(6, 6))
    ),
    "shift_in_time": Graph(
        "clip 1 6 4; text 1 4",
        "shifted score",
        lambda m, x, k: (torch.cat([x[:, 1:], x[:, :1]], 1), (x * k[:, None]).sum(-1)),
    ),
    "inpainting": Graph(
        "image 1 12; mask 1 12 <2; prompt 1 8", "out", lambda m, x, k, p: torch.where(k, m.a(p), x), lines(8, 12)
    ),
    "filter_of_a_whole_signal": Graph(
        "signal 2 1 32", "filtered", lambda m, x: m.a(x), lambda: {"a": nn.Conv1d(1, 1, 9, padding=4)}, open="signal 2"
    ),
    "gated_fusion": Graph("camera 2 6; lidar 2 6", "fused", fusion, lines(12, 6)),
    "highway": Graph("x 2 6", "y", highway, lines(6, 6, b=(6, 6))),
    "gate_of_a_gtrxl_layer": Graph("residual 2 6; attended 2 6", "gated", gtrxl_gate, lines(12, 12, b=(12, 6))),
    "images_behind_text": Graph(
        "text 1 5 4; image 1 3 4",
        "embeddings",
        lambda m, x, y: torch.cat([x, m.a(y)], 1),
        lines(4, 4),
        open="text 1;image 1",
    ),
}
