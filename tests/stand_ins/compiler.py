"""Stands in for torch.compile before CUDA graphs, without a GPU: graphs as its compiler gets them, and no kernels.

What is not static is copied before every step, what is written elsewhere than in place is copied by it, and what is not
where the inputs are keeps the whole graph from being recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

COMPILE = torch.compile


@dataclass(frozen=True)
class Graph:
    """One graph.

    Attributes:
        static, moving: bytes of inputs that keep their places, and of those that may not.
        written: bytes of copies within it, of what it writes in place too.
        devices: where its tensors are.
    """

    static: int
    moving: int
    written: int
    devices: frozenset[str]


class Compiler:
    """Stands in for `torch.compile`.

    Attributes:
        graphs: all that were compiled, in order.
        modes: what each was asked for with.
    """

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.modes: list[str | None] = []
        torch._dynamo.reset()

    def compile(self, work: Callable[..., Any], *, mode: str | None = None, **options: Any) -> Callable[..., Any]:
        """As `torch.compile`; what is returned computes with PyTorch's own operators."""
        from torch._inductor.compile_fx import compile_fx  # warns where it is imported: a test says that it may

        self.modes.append(mode)
        return COMPILE(work, backend=lambda graph, given: compile_fx(graph, given, inner_compile=self._note), **options)

    def _note(self, graph: GraphModule, given: list[Any], **options: Any) -> Callable[..., Any]:
        from torch._inductor.fx_passes.post_grad import post_grad_passes
        from torch._inductor.virtualized import V

        static = set(options["static_input_idxs"])
        sizes = [_bytes(value) for value in given]
        passed = copy.deepcopy(graph)
        with V.set_fake_mode(torch._guards.detect_fake_mode(given)):
            post_grad_passes(passed, is_inference=True)
        copies = [n for n in passed.graph.nodes if str(n.target) in ("aten.clone.default", "aten.copy_.default")]
        self.graphs.append(
            Graph(
                static=sum(size for index, size in enumerate(sizes) if index in static),
                moving=sum(size for index, size in enumerate(sizes) if index not in static),
                written=sum(_bytes(node.meta.get("val", _value(node))) for node in copies),
                devices=frozenset(
                    node.meta["val"].device.type
                    for node in graph.graph.nodes
                    if isinstance(node.meta.get("val"), torch.Tensor)
                ),
            )
        )

        def run(inputs: list[Any]) -> Any:
            values = list(inputs)
            inputs.clear()
            return graph.forward(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _value(node: Node) -> Any:
    """Return the value of what a pass's node writes to, since such a node says nothing of its own."""
    return node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
