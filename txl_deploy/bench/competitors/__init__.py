"""What a bundle is timed against: PyTorch as people run it, PyTorch at its best, and a plain ONNX export.

Those of a Transformer-XL are listed here; `own_module` has those of a model of the user's own. Every one has the
methods of `txl_deploy.bench.competitor.Competitor`, takes its weights from the bundle itself, and is compared with it
before it is timed.

    torch          eager, hidden memory, the released code's own layout
    torch-bhlk     eager, hidden memory, scores [B, H, L, K]
    torch-kv       eager, K/V memory, everything folded that does not depend on the input
    torch-compile  torch.compile of torch-kv
    torch-bf16     torch-kv in bfloat16
    onnx-hidden    this project's ONNX graph with hidden memory: every step projects the memory again
    onnx-rolled    the bundle's own graphs that return the whole new memory instead of writing a ring in place
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import torch
import txl_runtime
from txl_export.exporting import export
from txl_export.families.transformer_xl.family import weights_of_bundle
from txl_export.families.transformer_xl.weights import Weights
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.errors import UsageError
from txl_runtime.model import Model

from txl_deploy.bench.competitor import BundleCompetitor, Competitor, Maker
from txl_deploy.bench.competitors.cached import CompiledKeyValue, KeyValue
from txl_deploy.bench.competitors.hidden import BatchFirstHidden, TimeFirstHidden
from txl_deploy.bench.competitors.shared_layers import SharedLayers

NAMES = ("torch", "torch-bhlk", "torch-kv", "torch-compile", "torch-bf16", "onnx-hidden", "onnx-rolled")


def weights_of(model: Model) -> Weights:
    """The canonical parameters in a bundle, float32."""
    return weights_of_bundle(model.bundle.file(model.manifest.weights), model.manifest)


def config_values(config: ModelConfig, dialect: Dialect) -> dict[str, object]:
    """The fields of an own checkpoint's config, for another export of the same model."""
    values: dict[str, object] = msgspec.to_builtins(config)
    return values | {"memory_start": dialect.memory_start}


def why_not(name: str, model: Model) -> str | None:
    """Why a competitor cannot run here with this model; None when it can.

    Raises:
        UsageError: nothing is called that.
    """
    m = model.manifest
    if name not in NAMES:
        raise UsageError(f"--against has {name!r}, expected some of {', '.join(NAMES)}, or none")
    if name == "onnx-hidden":
        if m.dialect.segment_window or m.dialect.window not in (None, m.memory_length):
            return f"a window of {m.dialect.window or 'the segment'} cannot be exported from canonical weights"
        return "the bundle keeps hidden memory itself" if m.transformer_xl.memory == "hidden" else None
    if name == "onnx-rolled":
        kept = {program.update for program in m.programs}
        return None if kept >= {"rolled", "ring"} else f"the bundle has {' and '.join(sorted(kept))} programs only"
    if m.config.attn_type != 0 or m.dialect.segment_window:
        return f"the PyTorch competitors compute attn_type 0 without segment windows, this is {m.config.attn_type}"
    return no_compiler() if name == "torch-compile" else None


def no_compiler() -> str | None:
    """Why torch.compile cannot run here; None where it can."""
    own = os.environ.get("CXX")
    names = (own,) if own else ("g++", "clang++", "c++")
    if any(shutil.which(name) for name in names):
        return None
    return f"torch.compile needs a C++ compiler, none of {', '.join(names)} was found"


def competitors(names: tuple[str, ...], model: Model, threads: int, folder: Path) -> dict[str, Maker]:
    """Makers of some of `NAMES`, each able to run (`why_not`), with a bundle's weights.

    Torch is set to `threads` too; `folder` is an empty place for the bundle of onnx-hidden.
    """
    torch.set_num_threads(threads)
    state = weights_of(model) if names else {}
    m = model.manifest

    def parts(dtype: torch.dtype = torch.float32) -> SharedLayers:
        return SharedLayers(m.config, m.dialect, m.memory_length, state, dtype)

    makers: dict[str, Maker] = {
        "torch": lambda: (TimeFirstHidden(parts(), m.batch_size), "fp32"),
        "torch-bhlk": lambda: (BatchFirstHidden(parts(), m.batch_size), "fp32"),
        "torch-kv": lambda: (KeyValue(parts(), m.batch_size), "fp32"),
        "torch-compile": lambda: (CompiledKeyValue(parts(), m.batch_size, m.segment_lengths[0]), "fp32"),
        "torch-bf16": lambda: (KeyValue(parts(torch.bfloat16), m.batch_size, "torch-bf16"), "bf16"),
        "onnx-hidden": lambda: (_onnx_hidden(model, state, threads, folder), "fp32"),
        "onnx-rolled": lambda: (_onnx_rolled(model, threads), str(m.precision)),
    }
    return {name: makers[name] for name in names}


def _onnx_hidden(model: Model, state: Weights, threads: int, folder: Path) -> Competitor:
    m = model.manifest
    export(
        state,
        folder / "hidden.txl",
        config=config_values(m.config, m.dialect),
        segment_length=m.segment_lengths,
        memory_length=m.memory_length,
        clamp_length=m.dialect.clamp_length or 0,
        same_length=m.dialect.window is not None,
        batch_size=m.batch_size,
        memory="hidden",
        verify=False,
    )
    other = txl_runtime.load(folder / "hidden.txl", threads=threads, verify_files=False)
    return BundleCompetitor("onnx-hidden", other)


def _onnx_rolled(model: Model, threads: int) -> Competitor:
    other = txl_runtime.load(model.bundle.path, threads=threads, verify_files=False, update="rolled")
    return BundleCompetitor("onnx-rolled", other)
