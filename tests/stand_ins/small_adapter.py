"""A package that no one publishes, written into a folder, and its adapter: all that an adapter has to be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from txl_export.adapters.table import ADAPTERS, Adapter
from txl_export.families.own_module.spec import InputSpec, Named, StateSpec, StepSpec
from txl_runtime.errors import UsageError

NAME, PACKAGE, VERSION = "small", "small-memory", "1.2.3"
CONFIG = {"width": 4, "scale": 0.5}
SOURCE = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width, scale=1.0, rings=0):
        super().__init__()
        if scale < 0:
            raise ValueError("scale is negative")
        self.cell, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, 2)
        self.scale, self.rings = scale, rings

    def forward(self, x, h):
        h = torch.tanh(self.cell(x) + self.scale * h)
        return self.head(h), h
"""


def build(config: Mapping[str, Any]) -> Any:
    """The package's module."""
    from small_memory import Net

    return Net(config["width"], **{name: value for name, value in config.items() if name != "width"})


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Its step."""
    if module.rings:
        raise UsageError(f"rings is {module.rings}, whose state is not carried, expected 0; train without")

    def step(net: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
        y, h = net(inputs["x"], states["h"])
        return {"y": y}, {"h": h}

    width = module.cell.in_features
    return StepSpec(module, [InputSpec("x", ("B", width))], [StateSpec("h", ("B", width))], ["y"], step=step)


def write_package(folder: Path) -> None:
    """Write the package as pip would install it."""
    (folder / "small_memory.py").write_text(SOURCE)
    facts = folder / f"small_memory-{VERSION}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")


@contextmanager
def adapter(**changes: Any) -> Iterator[ModuleType]:
    """With the adapter in the table; `changes` replace functions of its module."""
    table: Any = ADAPTERS
    module = ModuleType(f"txl_export.adapters.{NAME}")
    vars(module).update({"build": build, "step_spec": step_spec, **changes})
    table[NAME] = Adapter(NAME, PACKAGE, "small_memory")
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield module
    finally:
        sys.modules.pop("small_memory", None)
        if before is None:
            del table[NAME], sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before


def state_dict(width: int = 4) -> dict[str, torch.Tensor]:
    """Weights as the package would have them."""
    draws = torch.Generator().manual_seed(0)
    shapes = {"cell.weight": (width, width), "cell.bias": (width,), "head.weight": (2, width), "head.bias": (2,)}
    return {name: torch.randn(shape, generator=draws) * 0.5 for name, shape in shapes.items()}
