"""A step whose effective context is known: every further token makes it surer, up to a number of them."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto
from step_models import B, Graph, StepModel
from txl_runtime.bundle.tables import Input, Output, StateTensor

VOCABULARY = 16
PERIOD = 3
"""It predicts the token that it saw three places back."""
SURE = 3.0
"""The most that the logit of that token becomes; all others have 0."""


def copying(back: int, lengths: tuple[int, ...] = (8, 1), exact: bool = False) -> StepModel:
    """Log-probabilities of the next token; their context is the last `back` tokens, and as many make it surest.

    With `exact`, segments are whole and the sequences run in lockstep.
    """
    assert back >= PERIOD
    valid = Input(name="valid", dtype="int32", shape=("B",), role="valid")
    model = StepModel(
        inputs=(
            Input(name="tokens", dtype="int32", shape=("B", "L"), role="tokens", vocab=VOCABULARY),
            *(() if exact else (valid,)),
        ),
        outputs=(Output(name="logits", dtype="float32", shape=("B", "L", VOCABULARY), role="logprobs"),),
        states=(
            StateTensor(
                name="recent",
                input="state.recent.in",
                output="state.recent.out",
                dtype="int32",
                shape=(B, back),
                initial=-1.0,
                update="replace",
            ),
        ),
        lengths="exact" if exact else "valid",
        streams="lockstep" if exact else "independent",
    )
    for length in lengths:
        graph = Graph()
        seen = graph.add("Concat", ["state.recent.in", "tokens"], axis=1)
        first = back + 1 - PERIOD
        ends = [graph.constant([place], np.int64) for place in (first, first + length, 1)]
        copied = graph.add("Unsqueeze", [graph.add("Slice", [seen, *ends]), graph.constant([2], np.int64)])
        hot = graph.add("Equal", [copied, graph.constant(np.arange(VOCABULARY, dtype=np.int32)[None, None])])
        there = graph.add("GreaterOrEqual", ["state.recent.in", graph.constant(0, np.int32)])
        there = graph.add("Cast", [there], to=TensorProto.FLOAT)
        before = graph.add("ReduceSum", [there, graph.constant([1], np.int64)])
        known = graph.add("Add", [before, graph.constant(np.arange(1, length + 1, dtype=np.float32)[None])])
        known = graph.add("Min", [known, graph.constant(back, np.float32)])
        logit = graph.add("Mul", [known, graph.constant(SURE / back, np.float32)])
        logit = graph.add("Unsqueeze", [logit, graph.constant([2], np.int64)])
        scores = graph.add("Mul", [graph.add("Cast", [hot], to=TensorProto.FLOAT), logit])
        graph.add("LogSoftmax", [scores], "logits", axis=-1)
        places = graph.constant(np.tile(np.arange(back, dtype=np.int32), (B, 1)))
        moved = graph.constant(np.full((B, 1), length, np.int32))
        if not exact:
            moved = graph.add("Unsqueeze", ["valid", graph.constant([1], np.int64)])
        graph.add("GatherElements", [seen, graph.add("Add", [places, moved])], "state.recent.out", axis=1)
        model.add(f"step-{length}", length, graph)
    return model


def repeating(tokens: int) -> np.ndarray:
    """A text that such a model knows as well as it can: int32 [tokens]."""
    return np.resize([3, 11, 7], tokens).astype(np.int32)


def loss(back: int, context: int) -> float:
    """Return the loss of a token of that text that is predicted from `context` tokens."""
    logit = SURE * min(context, back) / back if context >= PERIOD else 0
    return math.log1p((VOCABULARY - 1) * math.exp(-logit))
