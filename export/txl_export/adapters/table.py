"""The table of adapters by name. Importing this module needs neither torch nor a package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """A line of the table of adapters.

    Attributes:
        module: name of the module in this folder with the functions of `registry.AdapterModule`.
        package: the model's package, as pip or people call it; "" if the model needs only torch.
        imports: the package's name in an import of Python.
        extra: the package's extra that pip has to install, e.g. "rllib" of ray.
        advice: how to get the package, if pip does not have it.
        by_key: for an adapter of several packages, the line of each package, by a key that only this package's configs
            have.
    """

    module: str
    package: str = ""
    imports: str = ""
    extra: str = ""
    advice: str = ""
    by_key: Mapping[str, Adapter] = field(default_factory=dict)

    def of(self, config: Mapping[str, Any]) -> Adapter:
        """Return the line of the package that builds models for this config."""
        return next((line for key, line in self.by_key.items() if key in config), self)

    @property
    def install(self) -> str:
        """The advice that a message gives if the package is missing, e.g. "pip install mambapy"."""
        return self.advice or (
            f"pip install '{self.package}[{self.extra}]'" if self.extra else f"pip install {self.package}"
        )


_MEMORY_TOKENS = "recurrent-memory-transformer-pytorch"
_FOLDER = 'name its folder as "repository" in the config'
_RL_GAMES = Adapter("recurrent_policy", "rl_games", "rl_games")
_POLICIES = {
    "obs_groups": Adapter("recurrent_policy", "rsl-rl-lib", "rsl_rl"),
    "params": _RL_GAMES,
    "network": _RL_GAMES,
    "policy_kwargs": Adapter("recurrent_policy", "sb3-contrib", "sb3_contrib"),
}

ADAPTERS: Mapping[str, Adapter] = {
    "x-transformers": Adapter("x_transformers", "x-transformers", "x_transformers"),
    "di-engine": Adapter("di_engine", "DI-engine", "ding"),
    "rllib": Adapter("rllib", "ray", "ray", extra="rllib"),
    "episodic": Adapter("episodic", "episodic-transformer-memory-ppo", "transformer", advice=_FOLDER),
    "recurrent-memory": Adapter("recurrent_memory", _MEMORY_TOKENS, _MEMORY_TOKENS.replace("-", "_")),
    "recurrent-policy": Adapter("recurrent_policy", by_key=_POLICIES),
    "emformer": Adapter("emformer", "torchaudio", "torchaudio"),
    "mamba": Adapter("mamba", "mambapy", "mambapy"),
}
"""Every adapter by its name on the command line."""
