"""PyTorch competitors of a bundle: PyTorch as people usually run it, and plain PyTorch at its best.

This module lists the competitors of a Transformer-XL; `own_module` has the competitors of a user's own model. Each has
the methods of `txl_deploy.bench.competitor.Competitor`, takes its weights from the bundle, and is compared with the
bundle before it is timed.

    torch          eager, hidden memory, the released code's own layout
    torch-kv       eager, K/V memory; products that do not depend on the input are computed only once
"""

from __future__ import annotations

import torch
from txl_export.families.transformer_xl.family import weights_of_bundle
from txl_runtime.errors import UsageError
from txl_runtime.model import Model

from txl_deploy.bench.competitor import Maker
from txl_deploy.bench.competitors.cached import KeyValue
from txl_deploy.bench.competitors.hidden import TimeFirstHidden
from txl_deploy.bench.competitors.shared_layers import SharedLayers

NAMES = ("torch", "torch-kv")
"""Names of the competitors of a Transformer-XL, as --against takes them."""


def competitors(names: tuple[str, ...], model: Model, threads: int) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return makers of the competitors in `names`, and the reason for each competitor that cannot run here.

    The competitors have the bundle's weights. PyTorch is set to `threads` threads.

    Raises:
        UsageError: a name is unknown.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise UsageError(f"--against has {unknown[0]!r}, expected some of {', '.join(NAMES)}, or none")
    if why := why_not(model):
        return {}, dict.fromkeys(names, why)
    torch.set_num_threads(threads)
    m = model.manifest
    state = weights_of_bundle(model.bundle.file(m.weights), m)

    def parts() -> SharedLayers:
        return SharedLayers(m.config, m.dialect, m.memory_length, state)

    makers: dict[str, Maker] = {
        "torch": lambda: TimeFirstHidden(parts(), m.batch_size),
        "torch-kv": lambda: KeyValue(parts(), m.batch_size),
    }
    return {name: makers[name] for name in names}, {}


def why_not(model: Model) -> str:
    """Return the reason why the PyTorch competitors cannot run this model; "" if they can."""
    m = model.manifest
    if m.config.attn_type != 0 or m.dialect.segment_window:
        return f"the PyTorch competitors compute attn_type 0 without segment windows, this is {m.config.attn_type}"
    return ""
