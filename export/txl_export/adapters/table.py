"""Every adapter by its name. Importing this module needs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Adapter:
    """One line of the table.

    Attributes:
        module: in this folder, with the functions of `registry.AdapterModule`.
        package: that the model comes from, as pip or people call it; "" where torch is all it needs.
        imports: the same, as Python imports it.
        extra: what pip has to install of the package.
        advice: how to get it, where pip does not have it.
    """

    module: str
    package: str = ""
    imports: str = ""
    extra: str = ""
    advice: str = ""

    @property
    def install(self) -> str:
        """What to do where the package is missing."""
        return self.advice or (
            f"pip install '{self.package}[{self.extra}]'" if self.extra else f"pip install {self.package}"
        )


_MEMORY_TOKENS = "recurrent-memory-transformer-pytorch"
_FOLDER = 'name its folder as "repository" in the config'

ADAPTERS: Mapping[str, Adapter] = {
    "x-transformers": Adapter("x_transformers", "x-transformers", "x_transformers"),
    "di-engine": Adapter("di_engine", "DI-engine", "ding"),
    "rllib": Adapter("rllib", "ray", "ray", extra="rllib"),
    "episodic": Adapter("episodic", "episodic-transformer-memory-ppo", "transformer", advice=_FOLDER),
    "recurrent-memory": Adapter("recurrent_memory", _MEMORY_TOKENS, _MEMORY_TOKENS.replace("-", "_")),
    "recurrent-policy": Adapter("recurrent_policy"),
    "emformer": Adapter("emformer", "torchaudio", "torchaudio"),
    "mamba": Adapter("mamba", "mambapy", "mambapy"),
}
"""Every adapter by its name on the command line."""
