"""Files that are wrong in a way that people have shipped: each is a right case with one thing changed before.

Where a thread is named, its defect is the model of the change. `where` is what the last line of the command has to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper

from .modules import RIGHTS, Case, calling


class Mutant(NamedTuple):
    of: str
    where: tuple[str, ...]
    change: Callable[[Any], Any] | None
    names: str = ""
    """The file's names, where they are not the right case's."""
    edit: Callable[[onnx.GraphProto], None] | None = None

    def case(self) -> Case:
        right = RIGHTS[self.of]
        names = self.names or right.names
        return dataclasses.replace(right, names=names, change=self.change, edit=self.edit, fails=self.where)


def calls(of: str, where: str, call: Callable[..., Any], names: str = "") -> Mutant:
    """A function that is called in place of the right one, which it is given."""
    return Mutant(of, tuple(where.split(", ")), calling(call), names)


def keep(right: Any, *given: Any, **after: Any) -> tuple[Any, ...]:
    """The right results but for the states given by their place among the results."""
    results = list(right(*given))
    for place, value in after.items():
        results[int(place[1:])] = value
    return tuple(results)


def gates_of_another_library(module: Any) -> None:
    with torch.no_grad():
        for weight in module.lstm.parameters():
            a, f, g, o = weight.chunk(4)
            weight.copy_(torch.cat([a, f, o, g]))


def normaliser_in_training_mode(module: Any) -> None:
    norm = module.norm
    norm.forward = lambda x: (x - x.mean(0)) / torch.sqrt(x.var(0, correction=0) + norm.eps)


def quantised(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim == 2:
            scale = abs(array).max() / 127
            tensor.CopyFrom(numpy_helper.from_array((array / scale).round() * scale, tensor.name))


def crosswise(graph: onnx.GraphProto) -> None:
    names = {"aa_out": "y", "y": "aa_out"}
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
        node.input[:] = [names.get(name, name) for name in node.input]


XL = "x m0 m1 -> y m0_out=m0' m1_out=m1'"
KV = "x k v fill -> y k_out=k' v_out=v' fill_out=fill'"

MUTANTS = {
    # tflite-micro#3564: the kernel wipes the cell state at its start
    "cell_state_wiped": calls(
        "lstm_two_layers", "output y, state h, state c", lambda m, own, x, h, c: own(m, x, h, c * 0)
    ),
    # CMSIS-NN#219: the kernel is given no hidden state
    "hidden_state_ignored": calls("gru_two_layers", "output y, state h", lambda m, own, x, h: own(m, x, h * 0)),
    # agents-js#944: the state stays what it was at the start
    "state_as_it_was_given": calls("gru_cell", "state h", lambda m, own, x, h: (own(m, x, h)[0], h.clone())),
    # agents-js#944: the context is cut at the wrong end
    "context_from_the_wrong_end": calls(
        "convolution_caches",
        "state cache1",
        lambda m, own, x, a, b: keep(own, m, x, a, b, _1=torch.cat([a, x.transpose(1, 2)], 2)[:, :, :4]),
    ),
    # silero-vad#533: the samples before the frame are missing
    "context_of_zeros": calls(
        "convolution_caches",
        "output y, state cache2",
        lambda m, own, x, a, b: keep(own, m, x, a * 0, b, _1=torch.cat([a, x.transpose(1, 2)], 2)[:, :, -4:]),
    ),
    # onnxruntime#11085: the state that the export was given became a constant
    "state_of_the_example": calls(
        "tokens_through_a_gru", "output logits, state hidden", lambda m, own, x, h: own(m, x, torch.zeros(1, 1, 8))
    ),
    # DeepFilterNet#655: a file without memory
    "no_state_in_the_file": calls(
        "stacked_state_and_sampling_rate",
        "output y, state state",
        lambda m, own, x, h: own(m, x, torch.zeros(2, 2, 10)),
    ),
    # transformers#47900, NeMo#5867: the window is never cut, and the outputs agree
    "window_grows_for_ever": calls(
        "memory_that_grows",
        "gives present of the shape",
        lambda m, own, x, past: (own(m, x, past[:, -8:])[0], torch.cat([past, x], 1)),
    ),
    # IsaacLab#2821: the normaliser was not in evaluation mode
    "normaliser_in_training_mode": Mutant("policy_that_takes_done", ("output y",), normaliser_in_training_mode),
    # tflite-micro#3564: a stride makes rows of the batch read their neighbours
    "rows_read_their_neighbours": calls(
        "lstm_written_out",
        "output y, state h, state c",
        lambda m, own, x, h, c: own(m, x, torch.cat([h[1:], h[:1]]), c),
    ),
    # sherpa-onnx#1700: a reset leaves one of the states as it is
    "reset_of_one_state": calls(
        "policy_that_takes_done",
        "output y",
        lambda m, own, x, done, h, c: own(m, x, torch.zeros_like(done), h * (~done).float()[:, None], c),
    ),
    "h_and_c_swapped": calls(
        "policy_that_takes_done",
        "state h, state c",
        lambda m, own, x, done, h, c: [own(m, x, done, h, c)[place] for place in (0, 1, 3, 2)],
    ),
    "layers_in_another_order": calls(
        "gru_two_layers", "state h", lambda m, own, x, h: (own(m, x, h)[0], own(m, x, h)[1].flip(0))
    ),
    "state_of_the_position_before": calls(
        "parallel_scan", "state h", lambda m, own, x, h: (own(m, x, h)[0], own(m, x[:, :-1], h)[1])
    ),
    "window_not_moved": calls(
        "dilated_windows",
        "state w1",
        lambda m, own, x, a, b: keep(own, m, x, a, b, _2=torch.cat([b[:, :-1], own(m, x, a, b)[2][:, -1:]], 1)),
    ),
    "pointer_beyond_the_ring": calls(
        "ring_and_pointer",
        "state pointer",
        lambda m, own, x, ring, pointer: keep(own, m, x, ring, pointer, _2=torch.remainder(pointer + 1, 8)),
    ),
    "counter_that_stops_early": calls(
        "running_normaliser",
        "state count",
        lambda m, own, *given: keep(own, m, *given, _3=torch.clamp(given[3] + 1, max=40)),
    ),
    "padding_reaches_the_state": calls(
        "sums_of_valid_positions",
        "state total",
        lambda m, own, x, total, valid: (own(m, x, total, valid)[0], total + m.mix(x).sum(1)),
    ),
    "gates_of_another_library": Mutant("lstm_two_layers", ("output y",), gates_of_another_library),
    "position_of_the_example": calls(
        "counter_of_steps", "output y", lambda m, own, x, p: (own(m, x, torch.ones_like(x[:, 0]).long())[0], p + 1)
    ),
    "mask_of_one_position_more": calls(
        "transformer_xl_memory",
        "output y",
        lambda m, own, x, a, b: keep(own, m, x, a, b, _0=own(m, torch.cat([x[:, :1], x[:, :-1]], 1), a, b)[0]),
        names=XL,
    ),
    "oldest_row_is_never_seen": calls(
        "keys_and_values",
        "output y",
        lambda m, own, x, k, v, fill: keep(own, m, x, k, v, fill, _0=own(m, x, k, v, torch.clamp(fill, max=1))[0]),
        names=KV,
    ),
    "epsilon_of_another_layer_norm": Mutant(
        "transformer_xl_memory", ("output y",), lambda m: [setattr(norm, "eps", 1e-3) for norm in m.norm], names=XL
    ),
    "state_rounded_to_half": calls(
        "selective_state", "state ssm", lambda m, own, *given: keep(own, m, *given, _2=own(m, *given)[2].half().float())
    ),
    "mask_forgets": calls("mask_of_bool", "state seen", lambda m, own, x, seen: (own(m, x, seen)[0], x > 1.2)),
    "dropout_left_on": calls(
        "keys_and_values",
        "output y",
        lambda m, own, *given: keep(own, m, *given, _0=F.dropout(own(m, *given)[0], 0.1, training=True)),
        names=KV,
    ),
    "weights_quantised_by_a_tool": Mutant("gru_cell", ("output y",), None, edit=quantised),
    "outputs_named_crosswise": Mutant("rwkv_like", ("output y, state aa",), None, edit=crosswise),
}
