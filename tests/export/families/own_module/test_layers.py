"""Layers recognised by names and shapes: each as torch writes it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from txl_export.families.own_module.layers import Part, layer_of, parts_of

LAYERS = {
    "nn.LSTM(5, 8)": nn.LSTM(5, 8),
    "nn.LSTM(5, 8, num_layers=3, bias=False)": nn.LSTM(5, 8, 3, bias=False),
    "nn.GRU(5, 8, num_layers=2)": nn.GRU(5, 8, 2),
    "nn.LSTMCell(5, 8)": nn.LSTMCell(5, 8),
    "nn.GRUCell(5, 8, bias=False)": nn.GRUCell(5, 8, bias=False),
    "nn.Linear(5, 8)": nn.Linear(5, 8),
    "nn.Linear(5, 8, bias=False)": nn.Linear(5, 8, bias=False),
    'nn.Conv1d(5, 8, 3, padding="same")': nn.Conv1d(5, 8, 3),
    "nn.Conv1d(5, 8, 1, bias=False)": nn.Conv1d(5, 8, 1, bias=False),
    'nn.Conv2d(5, 8, (3, 1), padding="same")': nn.Conv2d(5, 8, (3, 1)),
    "nn.LayerNorm(8)": nn.LayerNorm(8),
    "nn.LayerNorm(8, bias=False)": nn.LayerNorm(8, bias=False),
}
OTHERS = {
    "bidirectional": nn.LSTM(5, 8, bidirectional=True),
    "projected": nn.LSTM(5, 8, proj_size=3),
    "a plain RNN": nn.RNN(5, 8),
    "with a buffer more": nn.Linear(5, 8),
    "batch norm": nn.BatchNorm1d(4),
}
OTHERS["with a buffer more"].register_buffer("mask", torch.ones(8, 5))


def part(module: nn.Module, kind: str = "") -> Part:
    return parts_of(module.state_dict(), {"": kind})


@pytest.mark.parametrize("text", LAYERS)
def test_a_layer_is_written_as_it_was_made(text: str) -> None:
    module = LAYERS[text]
    for kind in ("", f"torch.nn.modules.some.{type(module).__name__}"):
        layer = layer_of(part(module, kind), "layer")
        assert layer is not None
        assert layer.text == text
        made = eval(text, {"nn": nn})
        made.load_state_dict(module.state_dict())


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_such_layer_is_left_alone(case: str) -> None:
    assert layer_of(part(OTHERS[case]), "layer") is None


def test_tensors_of_no_size_are_no_layer() -> None:
    assert layer_of(parts_of({"weight": torch.zeros(0, 4)}, {}), "layer") is None


def test_a_class_that_is_known_decides() -> None:
    weight = {"weight": torch.zeros(9, 4)}
    assert getattr(layer_of(parts_of(weight, {}), "token_embedding"), "text", "") == "nn.Embedding(9, 4)"
    assert getattr(layer_of(parts_of(weight, {}), "head"), "text", "") == "nn.Linear(4, 9, bias=False)"
    for kind in ("Embedding", "Linear"):
        layer = layer_of(parts_of(weight, {"": f"torch.nn.modules.some.{kind}"}), "head")
        assert layer is not None
        assert layer.kind == kind
    assert layer_of(parts_of(weight, {"": "torch.nn.modules.some.Bilinear"}), "head") is None


def test_a_layer_without_tensors_is_known_by_its_class_alone() -> None:
    assert getattr(layer_of(Part("torch.nn.modules.activation.ELU"), "1"), "text", "") == "nn.ELU()"
    assert getattr(layer_of(Part("torch.nn.modules.activation.Softmax"), "1"), "text", "") == "nn.Softmax(-1)"
    assert layer_of(Part("own.activation.ELU"), "1") is None
    assert layer_of(Part("torch.nn.modules.padding.ReflectionPad1d"), "1") is None
