"""Run a Transformer-XL that `torch.onnx.export` wrote, with keys and values as inputs and outputs, in two engines.

onnx-kv         ONNX Runtime by hand: `session.run` with a dictionary, which gets the new keys and values back
openvino        the same file in OpenVINO in float32, as a stateful model whose states are the keys and values
openvino-bf16   openvino with INFERENCE_PRECISION_HINT bf16

The exporter is PyTorch's older one, which traces (`dynamo=False`): its file is as fast as the newer exporter's in ONNX
Runtime, and takes 0.85 to 0.9 of the time in OpenVINO. OpenVINO is no dependency of the project; without it, its rows
are left out.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from txl_runtime.types import Array, Ids

from txl_deploy.bench.competitors.cached import KeyValue, shift
from txl_deploy.bench.competitors.shared_layers import SharedLayers, Work

__all__ = ["Engine", "OnnxRuntime", "OpenVino", "PlainExport", "emulates_bf16", "no_openvino"]

AFTER = "_out"
"""The suffix that the names of new keys and values have as outputs."""


def no_openvino() -> str:
    """Return the reason why OpenVINO cannot run here; "" if it can."""
    return "" if importlib.util.find_spec("openvino") else "OpenVINO is not installed: pip install openvino"


def emulates_bf16() -> bool:
    """Return True if OpenVINO is installed and emulates bfloat16, because the processor cannot multiply bfloat16."""
    if no_openvino():
        return False
    import openvino

    return "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class OnnxRuntime:
    """ONNX Runtime on the CPU with its default settings, called as in its tutorials.

    Attributes:
        memory: keys, then values, of each layer, [B, H, M, d_head], e.g. [1, 8, 640, 64].
        description: the engine and its file, in words.
    """

    description = "torch.onnx.export of torch-kv, keys and values in and out, ONNX Runtime by hand"

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._tokens, *self._names = (entry.name for entry in self._session.get_inputs())
        self.memory: list[Array] = []

    def call(self, tokens: Ids) -> Array:
        """Run token ids, int32 [B, T], e.g. [1, 64], keep the new keys and values, and return the file's answer."""
        fed: dict[str, Any] = dict(zip(self._names, self.memory, strict=True))
        answer, *self.memory = self._session.run(None, {self._tokens: tokens} | fed)
        return np.asarray(answer)


class OpenVino:
    """OpenVINO on the CPU, with the attributes of `OnnxRuntime`.

    The model is stateful, because states that are fed by hand took 1.1 to 1.3 times as long.

    Args:
        path: the ONNX file.
        threads: the number of OpenVINO's threads.
        precision: "f32" or "bf16", the INFERENCE_PRECISION_HINT.
    """

    def __init__(self, path: Path, threads: int, precision: str) -> None:
        import openvino
        from openvino.passes import MakeStateful, Manager

        core = openvino.Core()
        model = core.read_model(path)
        names = [entry.any_name for entry in model.inputs[1:]]
        passes = Manager()
        passes.register_pass(MakeStateful({name: name + AFTER for name in names}))
        passes.run_passes(model)
        settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision}
        self._tensor, self._request = openvino.Tensor, core.compile_model(model, "CPU", settings).create_infer_request()
        states = {state.name: state for state in self._request.query_state()}
        self._states = [states[f"{name}{name}{AFTER}"] for name in names]
        emulated = " by emulation" if precision == "bf16" and emulates_bf16() else ""
        version = openvino.__version__.partition("-")[0]
        self.description = f"the file of onnx-kv in OpenVINO {version}, stateful, {precision}{emulated}"

    @property
    def memory(self) -> list[Array]:
        """Return a copy of the keys and values of all layers, e.g. [1, 8, 640, 64] each."""
        return [np.array(state.state.data) for state in self._states]

    @memory.setter
    def memory(self, memory: Sequence[Array]) -> None:
        for state, rows in zip(self._states, memory, strict=True):
            state.state = self._tensor(np.ascontiguousarray(rows))

    def call(self, tokens: Ids) -> Array:
        """Run token ids, int32 [B, T], e.g. [1, 64], and return the file's answer."""
        return np.array(self._request.infer([tokens], share_inputs=True, share_outputs=True)[0])


Engine = OnnxRuntime | OpenVino


class PlainExport(KeyValue):
    """The form torch-kv, exported: keys and values are inputs of a file, and their last M rows are outputs.

    The form runs eagerly until the memory is full, so that a file's shapes never change. Each kind of work
    (log-probabilities, the most likely token, nats) and each segment length has a file of its own. A file is exported
    when it is first needed, unless `folder` has it already. `opened` opens a file in an engine.

    Attributes:
        given: keys, then values, of each layer, [B, H, M, d_head], while a step is exported; () at other times.
        after: the keys and values after the exported step.
    """

    def __init__(
        self,
        name: str,
        parts: SharedLayers,
        batch_size: int,
        opened: Callable[[Path], Engine],
        folder: Path,
        precision: str = "fp32",
    ) -> None:
        self.name, self.precision, self._opened, self._folder = name, precision, opened, folder
        self._engines: dict[tuple[str, int], Engine] = {}
        self.given: Sequence[Tensor] = ()
        self.after: list[Tensor] = []
        super().__init__(parts, batch_size)

    def reset(self) -> None:
        super().reset()
        self._running: Engine | None = None

    def on_arrays(self, work: Work, tokens: Ids) -> Array:
        if self.rows < self.parts.memory_length:
            return super().on_arrays(work, tokens)
        asked = work.__name__, tokens.shape[1]
        if asked not in self._engines:
            self._engines[asked] = self._opened(self._exported(work, tokens))
        engine = self._engines[asked]
        if engine is not self._running:
            engine.memory = self._running.memory if self._running else [rows.numpy() for rows in self.memory()]
            self._running, self.description = engine, engine.description
        return engine.call(tokens)

    def segment(self, tokens: Tensor) -> Tensor:
        if not self.given:
            return super().segment(tokens)
        given, m, length = self.given, self.parts.memory_length, tokens.shape[1]
        mask, self.after = self._mask(length, m), []

        def join(i: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = torch.cat([given[2 * i], key], dim=2), torch.cat([given[2 * i + 1], value], dim=2)
            self.after += [keys[:, :, length:], values[:, :, length:]]
            return keys, values

        def place(scores: Tensor) -> Tensor:
            return shift(scores) if mask is None else shift(scores) + mask

        return self.layers(tokens, self._tables(m + length), join, place)

    def step_bytes(self, length: int) -> int:
        return super().step_bytes(length) // (2 if self.precision == "bf16" else 1)

    def _exported(self, work: Work, tokens: Ids) -> Path:
        path = self._folder / f"{work.__name__}-{tokens.shape[1]}.onnx"
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [f"{kind}.{i}" for i in range(self.parts.config.n_layer) for kind in ("key", "value")]
        examples = torch.from_numpy(tokens), *self.memory()
        step = _Step(self, work)
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # hides the warning that torchvision is absent
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            step(*examples)  # this run computes the tables and masks that become constants of the file
            torch.onnx.export(
                step,
                examples,
                str(path),
                input_names=["tokens", *names],
                output_names=["answer", *(name + AFTER for name in names)],
                dynamo=False,
            )
        return path


class _Step(nn.Module):
    """A `PlainExport`'s work as a module of positional tensors, which returns the answer and new keys and values."""

    def __init__(self, form: PlainExport, work: Work) -> None:
        super().__init__()
        self._form, self._work = form, work

    def forward(self, tokens: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        self._form.given = memory
        try:
            return self._work(tokens), *self._form.after
        finally:
            self._form.given = ()
