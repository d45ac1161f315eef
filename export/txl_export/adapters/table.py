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
        install: what to do where it is missing.
    """

    module: str
    package: str = ""
    imports: str = ""
    install: str = ""


_MEMORY_TOKENS = "recurrent-memory-transformer-pytorch"
_EPISODIC = "episodic-transformer-memory-ppo"

ADAPTERS: Mapping[str, Adapter] = {
    "x-transformers": Adapter("x_transformers", "x-transformers", "x_transformers", "pip install x-transformers"),
    "di-engine": Adapter("di_engine", "DI-engine", "ding", "pip install DI-engine"),
    "rllib": Adapter("rllib", "ray", "ray", "pip install 'ray[rllib]'"),
    "episodic": Adapter("episodic", _EPISODIC, "transformer", "put its folder on the path: PYTHONPATH=FOLDER"),
    "recurrent-memory": Adapter(
        "recurrent_memory", _MEMORY_TOKENS, _MEMORY_TOKENS.replace("-", "_"), f"pip install {_MEMORY_TOKENS}"
    ),
    "recurrent-policy": Adapter("recurrent_policy"),
    "emformer": Adapter("emformer", "torchaudio", "torchaudio", "pip install torchaudio"),
    "mamba": Adapter("mamba", "mambapy", "mambapy", "pip install mambapy"),
}
"""Every adapter by its name on the command line."""
