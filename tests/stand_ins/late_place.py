"""PyTorch's engine of `benchmarks` on the stand-in for CUDA: work is done when its turn comes, on copies."""

from __future__ import annotations

from typing import Any

import torch
from torch_engine import Place, view_of
from txl_runtime.bundle.tables import Program, tensor_bytes
from txl_runtime.device.interface import Launch

from stand_ins.driver import FakeDriver


class LatePlace(Place):
    """The stand-in for CUDA: work is done when its turn comes, on copies of what it reads."""

    device = "cpu"

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def tie(self, interpreter: Any, program: Program, addresses: Any, in_place: Any, queue: Any) -> Launch:
        reads, writes = (
            [(addresses[spec.name], tensor_bytes(spec)) for spec in side] for side in (program.inputs, program.outputs)
        )

        def work(copies: list[Any]) -> list[Any]:
            values = {spec.name: view_of(raw, spec) for spec, raw in zip(program.inputs, copies, strict=True)}
            results = interpreter(values)
            return [results[spec.name].contiguous().view(torch.uint8).numpy() for spec in program.outputs]

        return lambda: self._driver.launch(queue.handle, work, reads, writes, f"run {program.name}")
