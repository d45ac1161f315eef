"""Finds the specification of a user's model from its source.

A source is a `StepSpec`, FILE.py:FUNCTION, or a package's model by its adapter. Importing this module needs no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from txl_runtime.errors import UsageError

from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.spec import StepSpec


def found_source(source: Any) -> Any:
    """Return a trainer's run, given by its path, as the model of its adapter; any other source as it is."""
    if not isinstance(source, str | Path) or not Path(source).exists():
        return source
    from txl_export.adapters.runs import is_run, read_run

    return read_run(Path(source)) if is_run(Path(source)) else source


def asked_module(module: Any, weights: Any, adapter: str | None, config: Any) -> Any:
    """Return the model that a bundle is compared with: `module`, or a package's model by its adapter; None for neither.

    Raises:
        UsageError: the options contradict each other.
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
    """Return the file or package whose code runs when a source is read; "" if none runs."""
    if isinstance(source, Adapted):
        from txl_export.adapters.registry import package_of

        return package_of(source.name, source.config)
    file = str(source).rpartition(":")[0] if isinstance(source, str | Path) else ""
    return file if Path(file).is_file() else ""


def read_source(source: Any, weights: str | Path | None) -> tuple[StepSpec, str]:
    """Return the specification of a source, and the model's name for messages; FUNCTION gets the path `weights`.

    Raises:
        TxlError: there is no such file, function, adapter or package, or the function returns no specification.
    """
    from txl_export.families.own_module.loading import load_spec
    from txl_export.families.own_module.spec_checks import check_module

    if isinstance(source, Adapted):
        from txl_export.adapters.registry import load_adapted, package_of

        spec = load_adapted(source.name, source.config, source.weights)
        spec = replace(spec, facts={**source.facts, **(spec.facts or {})})
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
