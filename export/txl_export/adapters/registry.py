"""From a package's module, or from a config and a file of weights, to a `StepSpec`.

Importing this module needs neither torch nor any package; an adapter's module is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from txl_runtime.errors import CheckpointError, UsageError, one_line

from txl_export.adapters.table import ADAPTERS
from txl_export.families.own_module.own_code import OwnCodeError, own_code
from txl_export.families.own_module.spec import StepSpec

WRAPPERS = ("model", "model_state_dict", "state_dict")
"""Under one of these keys a training loop's checkpoint has the state dict."""
_NAMED = 4
"""So many tensors stand in a message."""


class AdapterModule(Protocol):
    """What an adapter's module offers; `split` may be missing."""

    def build(self, config: Mapping[str, Any]) -> Any:
        """The package's module, from its constructor's arguments."""

    def step_spec(self, module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
        """How a module is run, read from its attributes; `config` only for what the module does not tell.

        Raises:
            UsageError: an option whose state cannot be carried, or a missing key of the config.
        """

    def split(self, stored: Any) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """The state dict in what a checkpoint holds, and the config beside it, if there is one."""


class _Config(dict[str, Any]):
    """The constructor's arguments; one that is looked for and is not there is named."""

    def __missing__(self, key: str) -> Any:
        given = f"it has {', '.join(map(str, self))}" if self else "it is empty"
        raise UsageError(f"the config lacks {key}, {given}; give the constructor's arguments (--config FILE.json)")


def adapt(name: str, module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """The specification of a package's module that is in memory, with its weights.

    Args:
        name: of the adapter; `txl-deploy export --help` lists them.
        module: the package's own.
        config: the constructor's arguments, where the module itself does not tell a size.

    Raises:
        UsageError: there is no such adapter, or the module has what cannot be exported.
    """
    step_spec = _module(name).step_spec
    with own_code(f"the adapter {name} cannot read this {type(module).__name__}"):
        return step_spec(module, None if config is None else _Config(config))


def load_adapted(
    name: str, config: str | Path | Mapping[str, Any] | None, weights: str | Path | Mapping[str, Any]
) -> StepSpec:
    """Build a package's module, load its weights and specify it.

    Args:
        name: of the adapter.
        config: the arguments of the package's constructor, or a JSON file of them; None where the checkpoint holds them
            all. They come before those in the checkpoint.
        weights: a checkpoint of the package's, read without running anything in it; or a state dict in memory.

    Raises:
        UsageError: there is no such adapter or package, or the config does not fit.
        CheckpointError: the file is not read, or its tensors are not the module's.
    """
    adapter = _module(name)
    if isinstance(config, str | Path):
        from txl_export.checkpoints import read_config

        config = read_config(Path(config))
    named = "the state dict" if isinstance(weights, Mapping) else str(weights)
    if isinstance(weights, Mapping):
        stored: Any = weights
    else:
        from txl_export.checkpoints.plain_weights import read_weights

        stored = read_weights(weights)
    split = getattr(adapter, "split", _split)
    with own_code(f"{named}: the adapter {name} finds no state dict in it"):
        state, beside = split(stored)
    config = {**(beside or {}), **(config or {})}
    module = _built(name, adapter.build, _Config(config))
    _load(module, state, f"{named}: does not fit {name}'s {type(module).__name__} of this config")
    return adapt(name, module, config)


def package_of(name: str) -> str:
    """The package whose code an adapter runs, with its version: "x-transformers 2.31.10"; "" where it runs none."""
    from importlib.metadata import PackageNotFoundError, version

    package = ADAPTERS[name].package if name in ADAPTERS else ""
    try:
        return f"{package} {version(package)}" if package else ""
    except PackageNotFoundError:  # a checkout on the path, or nothing
        return package


def _module(name: str) -> AdapterModule:
    if name not in ADAPTERS:
        raise UsageError(f"there is no adapter {name!r}, expected one of {', '.join(ADAPTERS)}; check --adapter")
    return cast(AdapterModule, import_module(f"txl_export.adapters.{ADAPTERS[name].module}"))


def _built(name: str, build: Callable[[Mapping[str, Any]], Any], config: _Config) -> Any:
    """The module; what is not installed, and what the constructor refuses, in one line."""
    adapter = ADAPTERS[name]
    try:
        with own_code(f"{name}: the package refuses the config"):
            return build(config)
    except OwnCodeError as error:
        lacking = error.__cause__
        if not isinstance(lacking, ModuleNotFoundError) or not lacking.name:
            raise
        top = lacking.name.partition(".")[0]
        if top != adapter.imports:
            raise UsageError(f"{name} needs {lacking.name}, which is not installed; pip install {top}") from error
        raise UsageError(f"{adapter.package} is not installed; {adapter.install}") from error


def _split(stored: Any) -> tuple[Mapping[str, Any], None]:
    """The state dict of the usual checkpoints: the file itself, or under one of `WRAPPERS`."""
    if isinstance(stored, Mapping):
        inside = [stored[key] for key in WRAPPERS if isinstance(stored.get(key), Mapping)]
        stored = inside[0] if inside else stored
    if not isinstance(stored, Mapping) or not any(hasattr(value, "shape") for value in stored.values()):
        found = f"the keys {', '.join(map(str, list(stored)[:8]))}" if isinstance(stored, Mapping) else type(stored)
        raise CheckpointError(
            f"there are {found}, expected tensors by name, or these under {', '.join(WRAPPERS)}; "
            "save model.state_dict()"
        )
    return stored, None


def _load(module: Any, state: Mapping[str, Any], what: str) -> None:
    """Load a state dict, all of it and nothing else; a prefix that all names have beside the module's own is dropped.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    expected = {key: tuple(getattr(value, "shape", ())) for key, value in module.state_dict().items()}
    state = _without_prefix(state, expected)
    shapes = {key: tuple(getattr(value, "shape", ())) for key, value in state.items()}
    parts = {
        "missing": [key for key in expected if key not in shapes],
        "not expected": [key for key in shapes if key not in expected],
        "of another shape": [
            f"{key} is {list(shape)}, expected {list(expected[key])}"
            for key, shape in shapes.items()
            if key in expected and shape != expected[key]
        ],
    }
    if found := [f"{kind}: {_few(names)}" for kind, names in parts.items() if names]:
        raise CheckpointError(f"{what}; {'; '.join(found)}; check --config, which has to be that of the training")
    try:
        module.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from None


def _without_prefix(state: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """The names as the module has them: "module." and whatever else a wrapper put before every one of them."""
    first = next(iter(expected), "")
    found = [key.removesuffix(first) for key in state if key == first or key.endswith(f".{first}")]
    for prefix in (*found, "module."):
        cut = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if len(cut) == len(state) and (prefix == "module." or cut.keys() == expected.keys()):
            return cut
    return state


def _few(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
