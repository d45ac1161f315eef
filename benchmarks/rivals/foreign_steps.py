"""Make steps of models of other packages and repositories; an error names a package or checkout that is missing."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timed_step import Step
from txl_export import InputSpec, OutputSpec, StateSpec, StepSpec
from txl_export.families.own_module.sources import read_source

ROOT = Path(__file__).parents[2]


class AbsentError(Exception):
    """A package or checkout that a step needs is missing."""


def gtrxl(batch: int) -> Step:
    """Make a step of the GTrXL of samples/policy."""
    spec, _ = read_source(f"{ROOT / 'samples' / 'policy' / 'gtrxl.py'}:build", None)
    return Step(spec, batch)


def emformer() -> Step:
    """Make a step of torchaudio's Emformer: 2 layers of width 128, segments of 4 frames."""
    config = {"input_dim": 128, "num_heads": 4, "ffn_dim": 256, "num_layers": 2, "segment_length": 4}
    return Step(
        _adapted("emformer", "torchaudio", {**config, "left_context_length": 16, "right_context_length": 1}), 1, 4
    )


def mamba(width: int = 128, layers: int = 2) -> Step:
    """Make a step of one token of mambapy's Mamba, by default with 2 layers of width 128."""
    return Step(_adapted("mamba", "mambapy", {"d_model": width, "n_layers": layers}))


def x_transformers() -> Step:
    """Make a step of x-transformers' Transformer-XL: 2 layers of width 128 with a memory of 64 rows."""
    layers = {"dim": 128, "depth": 2, "heads": 4, "attn_dim_head": 32, "rel_pos_bias": True}
    config = {"num_tokens": 256, "max_seq_len": 64, "max_mem_len": 64, "attn_layers": layers}
    spec = _adapted("x_transformers", "x_transformers", config)
    return Step(replace(spec, lengths=False, outputs=[OutputSpec("scores")], step=_renamed(spec)))


def _renamed(spec: StepSpec) -> Any:
    """Return the step with its output named "scores", since an export turns logits into log-probabilities."""

    def step(module: Any, inputs: dict[str, Any], states: dict[str, Any]) -> Any:
        assert spec.step is not None
        outputs, after = spec.step(module, inputs, states)
        return {"scores": outputs["logits"]}, after

    return step


def _adapted(name: str, package: str, config: dict[str, Any]) -> StepSpec:
    """Return the step that an adapter makes of a package's module with random weights.

    Args:
        name: the adapter.
        package: the package that has to be installed.
        config: the adapter's config.

    Raises:
        AbsentError: the package is not installed.
    """
    if str(ROOT / ".packages") not in sys.path:
        sys.path.append(str(ROOT / ".packages"))
    if find_spec(package) is None:
        raise AbsentError(f"{package} is not installed; `make packages` installs it")
    adapter = import_module(f"txl_export.adapters.{name}")
    spec: StepSpec = adapter.step_spec(adapter.build(config).eval(), config)
    return spec


def gtcrn(outside: Path | None, file: str | None = None) -> Step:
    """Make a step of GTCRN's streaming module with its weights, or of the publisher's ONNX file of the name `file`."""
    folder = _checkout(outside, "gtcrn/stream")
    published = folder / "onnx_models" / f"{file or 'gtcrn_simple'}.onnx"
    if file is not None:
        return Step(published, published=published)
    if str(ROOT / ".packages") not in sys.path:
        sys.path.append(str(ROOT / ".packages"))
    sys.path.insert(0, str(folder))
    try:
        whole, stream = import_module("gtcrn").GTCRN(), import_module("gtcrn_stream").StreamGTCRN()
        weights = torch.load(
            folder / "onnx_models" / "model_trained_on_dns3.tar", map_location="cpu", weights_only=True
        )
        whole.load_state_dict(weights["model"])
        import_module("modules.convert").convert_to_stream(stream, whole)
    finally:
        sys.path.remove(str(folder))
    states = [
        StateSpec("conv_cache", (2, "B", 16, 16, 33)),
        StateSpec("tra_cache", (2, 3, 1, "B", 16)),
        StateSpec("inter_cache", (2, 1, 33, 16)),
    ]
    spec = StepSpec(stream.eval(), [InputSpec("mix", ("B", 257, 1, 2))], states, ["enh"], step=_cloned)
    return Step(spec, published=published)


def _cloned(module: Any, inputs: dict[str, Any], states: dict[str, Any]) -> Any:
    """Run GTCRN's module on copies of its caches, because the module writes into them."""
    enhanced, *after = module(inputs["mix"], *(state.clone() for state in states.values()))
    return {"enh": enhanced}, dict(zip(states, after, strict=True))


def dtln(outside: Path | None, number: int) -> Step:
    """Make a step of one of DTLN's two ONNX files, number 1 or 2."""
    folder = _checkout(outside, "DTLN/pretrained_model")
    published = folder / f"model_{number}.onnx"
    return Step(published, published=published)


def _checkout(outside: Path | None, place: str) -> Path:
    if outside is None:
        raise AbsentError(f"--outside FOLDER has to name a folder with a checkout of {place.split('/')[0]}")
    if not (outside / place).is_dir():
        raise AbsentError(f"{outside} has no {place}")
    return outside / place
