"""The decaying average as a family; see `txl_export.families.registry.Family`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import torch
from txl_export import ExportOptions, InputSpec, StateSpec, StepSpec
from txl_export.families.own_module.family import PreparedStep
from txl_export.families.own_module.plan import make_plan
from txl_export.families.own_module.verifying import verify_step
from txl_export.families.registry import VerifyRequest
from txl_export.proof.parity import Parity
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.listener import Listener
from txl_runtime.model import load

from stand_ins.averaging import Average


class Averaging(torch.nn.Module):
    """The step."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = torch.nn.Parameter(torch.tensor(decay))

    def forward(self, values: torch.Tensor, average: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        after = self.decay * average + (1 - self.decay) * values
        return values - after, after


def prepare(source: Average, options: ExportOptions, heard: Listener) -> PreparedStep:
    plan = make_plan(_spec(source), options.batch_sizes[0], options.segment_lengths, heard)
    return _Prepared(plan, "fp32", "auto", {"name": "averaging"}, None, {"source": {"name": "an average"}})


def verify(request: VerifyRequest, heard: Listener) -> tuple[Parity, None]:
    manifest = request.bundle.manifest
    source = Average(manifest.states[0].shape[1], float(manifest.family["decay"]))
    plan = make_plan(_spec(source), manifest.batch_size, manifest.segment_lengths, heard)
    opener = partial(load, request.bundle.path)
    return verify_step(opener, plan, "the recorded decay", request.segments, heard, None), None


class _Prepared(PreparedStep):
    def write(self, folder: Path, heard: Listener) -> Manifest:
        decay = self.plan.spec.module.decay.item()
        return msgspec.structs.replace(super().write(folder, heard), family={"name": "averaging", "decay": decay})


def _spec(source: Average) -> StepSpec:
    shape = ("B", source.width)
    return StepSpec(
        Averaging(source.decay), [InputSpec("values", shape)], [StateSpec("average", shape)], ["difference"]
    )
