"""Makes the step of mambapy's Mamba, or of its language model: one token, by the package's own `step`.

Each layer carries the convolution's last inputs and the state-space layer's state. The package can continue from a
state only by single tokens. With `--segment-length 64 --segment-length 1` a bundle also has segments of 64 tokens,
which are made of this step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from txl_runtime.errors import UsageError

from txl_export.families.own_module.spec import InputSpec, Named, OutputSpec, StateSpec, StepSpec


def build(config: Mapping[str, Any]) -> Any:
    """Return a `Mamba`, or with `vocab_size` the parts of mambapy.lm's `LM`, because its import needs CUDA."""
    from mambapy.mamba import Mamba, MambaConfig, RMSNorm

    arguments = dict(config)
    size, multiple = arguments.pop("vocab_size", None), arguments.pop("pad_vocab_size_multiple", None) or 1
    core = MambaConfig(**arguments)
    if size is None:
        return Mamba(core)
    size, width = -(-size // multiple) * multiple, core.d_model
    ends = {"embedding": nn.Embedding(size, width), "lm_head": nn.Linear(width, size, bias=False)}
    return nn.ModuleDict({**ends, "mamba": Mamba(core), "norm_f": RMSNorm(width, core.rms_norm_eps, core.mup)})


def step_spec(module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a `Mamba` over features, or of an `LM` over tokens."""
    layers = getattr(getattr(module, "mamba", module), "layers", ())
    mixers: list[Any] = [getattr(layer, "mixer", None) for layer in layers]
    known = all(hasattr(mixer, "ssm_step") and hasattr(mixer, "A_log") for mixer in mixers)
    # mixers with A_log_b also scan backwards
    if not mixers or not known or any(hasattr(mixer, "A_log_b") for mixer in mixers):
        raise UsageError(
            f"this {type(module).__name__} is not made of layers with mixer.ssm_step and A_log alone, expected "
            "mambapy.lm.LM or mambapy.mamba.Mamba; Mamba-2 and Jamba have other states, and Vision Mamba scans from "
            "behind: give a StepSpec of your own"
        )
    states = []
    for number, mixer in enumerate(mixers):
        (inner, size), taps = mixer.A_log.shape, mixer.conv1d.kernel_size[0]
        if taps < 2:
            raise UsageError(
                f"d_conv is {taps}, expected at least 2, because mambapy's step reads the token before in place of "
                "this one then; give a StepSpec of your own"
            )
        states.append(StateSpec(f"layers.{number:02d}.conv", ("B", inner, taps - 1)))
        states.append(StateSpec(f"layers.{number:02d}.ssm", ("B", inner, size)))
    if hasattr(module, "mamba"):
        size = module.lm_head.out_features
        tokens, logits = InputSpec("tokens", ("B",), tokens=size), OutputSpec("logits", ("B", size), role="logits")
        return StepSpec(module, [tokens], states, [logits], step=_step)
    width = mixers[0].in_proj.in_features
    features, encoded = InputSpec("features", ("B", width)), OutputSpec("encoded", ("B", width))
    return StepSpec(module, [features], states, [encoded], step=_step)


def _step(module: Any, inputs: Named, states: Named) -> tuple[Named, Named]:
    core = getattr(module, "mamba", module)
    held = list(states.values())
    caches = [(ssm, conv) for conv, ssm in zip(held[::2], held[1::2], strict=True)]
    x, caches = core.step(inputs["features"] if core is module else module.embedding(inputs["tokens"]), caches)
    after = dict(zip(states, (tensor for ssm, conv in caches for tensor in (conv, ssm)), strict=True))
    if core is module:
        return {"encoded": x}, after
    x = module.norm_f(x)
    return {"logits": module.lm_head(x / core.config.mup_width_mult if core.config.mup else x)}, after
