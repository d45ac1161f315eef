"""Facts about a Transformer-XL for reports, without PyTorch: implements `families.registry.FamilyFacts`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from txl_runtime.bundle.manifest import Manifest

POSITIONS = ("relative sinusoidal", "relative learned", "absolute sinusoidal", "absolute learned")


def takes(source: object) -> bool:
    """Return whether this family may export a source: a path or a state dict."""
    return isinstance(source, str | PathLike | Mapping)


def facts(manifest: Manifest) -> dict[str, str]:
    """Return architecture, positions and dialect, e.g. {"dialect": "nvidia, kv memory starts empty", …}."""
    model = manifest.transformer_xl
    config, dialect = model.config, model.dialect
    norm = "pre" if config.pre_lnorm else "post"
    window = "none" if dialect.window is None else f"{dialect.window} keys"
    if dialect.segment_window:
        window = "as many keys as the segment has tokens, all for a single one"
    if dialect.single_steps is not None:
        window += f", {dialect.single_steps} tokens at once as single ones"
    adaptive = f", clusters cut at {list(config.cutoffs)}, div_val {config.div_val}" if config.cutoffs else ""
    clamp = "none" if dialect.clamp_length is None else dialect.clamp_length
    return {
        "architecture": f"{_counted(config.n_layer, 'layer')}, d_model {config.d_model}, "
        f"{_counted(config.n_head, 'head')} of {config.d_head}, d_inner {config.d_inner}, "
        f"{_counted(config.vocab_size, 'token')}{adaptive}",
        "positions": f"{POSITIONS[config.attn_type]}, {norm}-norm, window {window}, clamp {clamp}",
        "dialect": f"{dialect.family}, {model.memory} memory starts {dialect.memory_start}",
    }


def _counted(value: int, one: str) -> str:
    return f"{value} {one}" if value == 1 else f"{value} {one}s"
