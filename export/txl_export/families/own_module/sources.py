"""What stands for a model of the user's own, and the way from there to its specification.

A `StepSpec`, FILE.py:FUNCTION, or a package's model by its adapter. Importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl_runtime.errors import UsageError

from txl_export.families.own_module.spec import StepSpec


@dataclass(frozen=True, eq=False)
class Adapted:
    """A package's model.

    Attributes:
        name: of the adapter.
        weights: a checkpoint of the package's, or a state dict in memory.
        config: the arguments of the package's constructor, or a JSON file of them; None where the checkpoint has them.
    """

    name: str
    weights: Any
    config: str | Path | Mapping[str, Any] | None = None

    @property
    def file(self) -> str | None:
        """The name of the file of weights."""
        return Path(self.weights).name if isinstance(self.weights, str | Path) else None


def asked_module(module: Any, weights: Any, adapter: str | None, config: Any) -> Any:
    """What a bundle is compared with: `module` or, where there is an adapter, a package's model; None for neither.

    Raises:
        UsageError: options are given that do not go together.
    """
    if adapter is None:
        if config is not None:
            raise UsageError("--config is given without --adapter, expected both or neither; give --adapter NAME too")
        return module
    if module is not None:
        raise UsageError("--module and --adapter are both given, and each names a model; leave one of them out")
    if weights is None:
        raise UsageError(f"--adapter {adapter} is given without --weights; give the package's checkpoint too")
    return Adapted(adapter, weights, config)


def whose_code(source: object) -> str:
    """The file or package whose code runs when a source is read; "" where none does."""
    if isinstance(source, Adapted):
        from txl_export.adapters.registry import package_of

        return package_of(source.name, source.config)
    file = str(source).rpartition(":")[0] if isinstance(source, str | Path) else ""
    return file if Path(file).is_file() else ""


def read_source(source: Any, weights: str | Path | None) -> tuple[StepSpec, str]:
    """The specification, and how to call the model. `weights` are what a FUNCTION is given.

    Raises:
        TxlError: there is no such file, function, adapter or package, or it does not give a specification.
    """
    from txl_export.families.own_module.loading import load_spec
    from txl_export.families.own_module.spec_checks import check_module

    if isinstance(source, Adapted):
        from txl_export.adapters.registry import load_adapted, package_of

        spec = load_adapted(source.name, source.config, source.weights)
        known = ", ".join(filter(None, (f"adapter {source.name}", package_of(source.name, source.config))))
        name = f"{type(spec.module).__name__} ({known})"
    elif isinstance(source, StepSpec):
        if weights is not None:
            raise UsageError("weights are given beside a StepSpec, whose module has its own; leave them out")
        spec, name = source, type(source.module).__name__
    else:
        file, _, function = str(source).rpartition(":")
        spec, name = load_spec(str(source), None if weights is None else str(weights)), f"{Path(file).name}:{function}"
    check_module(spec)
    return spec, name
