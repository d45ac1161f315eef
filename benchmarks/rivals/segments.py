"""Time 64 positions of a recurrent model as one segment, as 64 steps, and in the model's own parallel form in PyTorch.

    python benchmarks/rivals/segments.py [--only mamba] [--width 768 --heads 12] [--rounds 30]

All three run on one thread. Every round times each of them once by the thread's processor time, so that other work on
the machine matters little. "apart" is the error of the bundle's outputs over 4 chained segments: the largest difference
from the module in float64, which runs position by position, divided by the largest output. "parallel apart" is the
error of the parallel form's outputs over the first segment. Mamba needs mambapy; DeltaNet's and RWKV's parallel forms
need transformers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import foreign_steps as foreign
import mixer_steps as mixers
import numpy as np
import torch
import txl_export
from numpy.typing import NDArray
from timed_step import Step
from torch import Tensor
from torch.nn import functional as F
from txl_runtime import load

LENGTH, SEGMENTS = 64, 4
Parallel = Callable[[Any, Tensor], Tensor]
"""A function of a module and x [B, L, width] that returns the outputs [B, L, width] from fresh states."""


def retnet(module: Any, x: Tensor) -> Tensor:
    """Run a RetNet in parallel, as attention whose scores fade with the distance: x [1, 64, 128] → [1, 64, 128]."""
    batch, length, width = x.shape
    apart = torch.arange(length)[:, None] - torch.arange(length)
    fades = (module.fade ** apart.clamp(min=0)).tril()
    for mix, out, norm, group, wide in zip(
        module.mixes, module.outs, module.norms, module.groups, module.wide, strict=True
    ):
        query, key, value, gate = mix(norm(x)).chunk(4, -1)
        query, key, value = (part.view(batch, length, module.heads, -1).transpose(1, 2) for part in (query, key, value))
        results = (query @ key.transpose(2, 3) * fades * module.size**-0.5) @ value
        results = group(results.transpose(1, 2).reshape(-1, width)).view(x.shape)
        x = x + out(F.silu(gate) * results)
        x = x + wide(x)
    return x


def deltanet(module: Any, x: Tensor) -> Tensor:
    """Run a DeltaNet in chunks by transformers' function: x [1, 64, 128] → [1, 64, 128]."""
    rule = import_module("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule
    batch, length, width = x.shape
    for layer in module.layers:
        normed = layer.norms[0](x)
        into, gate = layer.mix(normed).split((3 * width, width), -1)
        seen = F.conv1d(F.pad(into.transpose(1, 2), (3, 0)), layer.taps[:, None], groups=3 * width)
        parts = F.silu(seen).transpose(1, 2).chunk(3, -1)
        query, key, value = (part.reshape(batch, length, layer.heads, -1) for part in parts)
        amount, fade = layer.gates(normed).chunk(2, -1)
        fade = -layer.rate.exp() * F.softplus(fade + layer.bias)
        result, _ = rule(
            query, key, value, fade, torch.sigmoid(amount), chunk_size=LENGTH, use_qk_l2norm_in_kernel=True
        )
        x = x + layer.out(layer.each(result).flatten(2) * F.silu(gate))
        gate, wide = layer.wide(layer.norms[1](x)).chunk(2, -1)
        x = x + layer.narrow(F.silu(gate) * wide)
    return x


def rwkv(module: Any, x: Tensor) -> Tensor:
    """Run an RWKV with transformers' loop over positions for the average, and all positions at once elsewhere.

    For example, x [1, 64, 128] → [1, 64, 128].
    """
    average = import_module("transformers.models.rwkv.modeling_rwkv").rwkv_linear_attention_cpu
    for layer in module.layers:
        now = layer.norms[0](x)
        before = F.pad(now, (0, 0, 1, 0))[:, :-1]
        key, value, gate = (
            linear(torch.lerp(before, now, mix))
            for linear, mix in (
                (layer.key, layer.mix_key),
                (layer.value, layer.mix_value),
                (layer.gate, layer.mix_gate),
            )
        )
        result, _ = average(torch.log(-layer.decay), layer.first, key, value)
        x = x + layer.out(torch.sigmoid(gate) * result)
        wide = layer.norms[1](x)
        before = F.pad(wide, (0, 0, 1, 0))[:, :-1]
        inner = torch.relu(layer.wide(torch.lerp(before, wide, layer.mix_in))).square()
        x = x + torch.sigmoid(layer.open(torch.lerp(before, wide, layer.mix_open))) * layer.narrow(inner)
    return x


def mamba(module: Any, x: Tensor) -> Tensor:
    """Run mambapy's own `forward`, a parallel scan: x [1, 64, 128] → [1, 64, 128]."""
    return module(x)  # type: ignore[no-any-return]


def models(width: int, heads: int) -> dict[str, tuple[Callable[[], Step], Parallel]]:
    """Return the functions that make each model's step, and the models' parallel forms, by name."""
    return {
        "retnet": (partial(mixers.retnet, width, heads), retnet),
        "rwkv": (partial(mixers.rwkv, width), rwkv),
        "deltanet": (partial(mixers.deltanet, width, heads), deltanet),
        "mamba": (partial(foreign.mamba, width), mamba),
    }


def exact(step: Step, x: NDArray[Any]) -> NDArray[Any]:
    """Run the module position by position, in float64 or, if it cannot, in float32, and return the outputs.

    For example, x [1, 64, 128] → [1, 64, 128].
    """
    from txl_export.families.own_module.module_call import Eager, in_float64
    from txl_export.families.own_module.sizes import fresh_states

    spec = step.source
    assert not isinstance(spec, Path)
    eager = in_float64(spec, 1, 1) or Eager(spec)
    states, results = dict(fresh_states(spec, 1, eager.dtype)), []
    for position in range(x.shape[1]):
        outputs, after = eager({spec.inputs[0].name: torch.from_numpy(x[:, position])}, states)
        states = dict(after)
        results.append(next(iter(outputs.values())).numpy())
    return np.stack(results, 1)


def apart(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Return the largest difference divided by the largest wanted value, e.g. 0.05 for [1.1, 2.0] and [1.0, 2.0]."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def timed(work: Callable[[], Any]) -> float:
    """Call a function, and return the processor seconds that this thread took."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def compare(name: str, step: Step, parallel: Parallel, rounds: int) -> str:
    """Export one model, time its three ways, compare their outputs, and return a row of the table."""
    spec: Any = step.source
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle.txl"
        txl_export.export(spec, bundle, segment_length=[LENGTH, 1], verify=False)
        model = load(bundle, "cpu", threads=1)
    stream, inputs = model.stream(), spec.inputs[0].name
    width = spec.inputs[0].shape[-1]
    x = np.random.default_rng(0).standard_normal((1, SEGMENTS * LENGTH, width), np.float32)
    segments = [np.ascontiguousarray(x[:, at : at + LENGTH]) for at in range(0, x.shape[1], LENGTH)]
    ones = [np.ascontiguousarray(x[:, at : at + 1]) for at in range(LENGTH)]
    wanted = exact(step, x)
    results = np.concatenate([next(iter(stream.run({inputs: one}).values())).copy() for one in segments], 1)
    with torch.no_grad():
        whole = torch.from_numpy(segments[0])
        theirs = parallel(spec.module, whole).numpy()
        ways: dict[str, Callable[[], Any]] = {
            "segment": lambda: stream.run({inputs: segments[1]}),
            "steps": lambda: [stream.run({inputs: one}) for one in ones],
            "parallel": lambda: parallel(spec.module, whole),
        }
        for work in ways.values():
            work()
        times = {way: np.array([]) for way in ways}
        for _ in range(rounds):
            for way, work in ways.items():
                times[way] = np.append(times[way], timed(work))
    ratio = [f"{np.median(times[way] / times['segment']):.1f}" for way in ("steps", "parallel")]
    middle = {way: f"{np.median(values) * 1e3:.1f}" for way, values in times.items()}
    errors = [f"{apart(results, wanted):.0e}", f"{apart(theirs, wanted[:, :LENGTH]):.0e}"]
    columns = [name, middle["steps"], middle["segment"], ratio[0], f"{middle['parallel']} ({ratio[1]})", *errors]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    """Read the command line, and print a row of the table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a model; repeatable")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.append(str(foreign.ROOT / ".packages"))
    print("| model | 64 steps, ms | a segment, ms | times | parallel form, ms (times) | apart | parallel apart |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, (make, parallel) in models(options.width, options.heads).items():
        if not options.only or name in options.only:
            torch.manual_seed(0)
            print(compare(f"{name} {options.width}", make(), parallel, options.rounds), flush=True)


if __name__ == "__main__":
    main()
