"""Makes a `StepSpec` from a package's module, or from a config and a file of weights.

Importing this module needs no package; an adapter's module is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn
from txl_runtime.errors import CheckpointError, UsageError, one_line, some

from txl_export.adapters.table import ADAPTERS
from txl_export.checkpoints import read_config
from txl_export.checkpoints.plain_weights import described, read_stored
from txl_export.families.own_module.own_code import OwnCodeError, own_code
from txl_export.families.own_module.spec import StepSpec

WRAPPERS = ("model", "model_state_dict", "state_dict", "weights")
"""Keys under which checkpoints of training loops store the state dict."""
_ENDINGS = (".pt", ".pth", ".pkl", ".safetensors")
_NESTED = 3
"""Maximum number of keys of `WRAPPERS` nested in one another, e.g. 2 in {"model": {"state_dict": …}}."""


class AdapterModule(Protocol):
    """The functions of an adapter's module; `split` may be missing."""

    def build(self, config: Mapping[str, Any]) -> Any:
        """Return the package's module, made with the constructor's arguments in `config`."""

    def step_spec(self, module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
        """Return the step of a module, read from its attributes; `config` supplies only values that they lack.

        Raises:
            UsageError: an option has state that cannot be carried, or the config lacks a key.
        """

    def split(
        self, stored: Any, config: Mapping[str, Any] | None
    ) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """Return a checkpoint's state dict, and the config that it holds or None; `config` is the user's."""


class _Config(dict[str, Any]):
    """The constructor's arguments; to read an argument that is missing raises an error that names it."""

    def __missing__(self, key: str) -> Any:
        keys = f"it has {', '.join(map(str, self))}" if self else "it is empty"
        raise UsageError(f"the config lacks {key}, {keys}; give the constructor's arguments (--config FILE.json)")


def adapt(name: str, module: Any, config: Mapping[str, Any] | None = None) -> StepSpec:
    """Return the step of a package's module in memory, with its weights, e.g. `adapt("mamba", model)`.

    Args:
        name: the adapter's name; docs/adapters.md lists all.
        module: the package's module.
        config: the constructor's arguments, if the module's attributes lack a size.

    Raises:
        UsageError: there is no such adapter, or the module has an option that cannot be exported.
        CheckpointError: the module's weights contain NaN or infinity.
    """
    return _specified(name, module, config, f"this {type(module).__name__}")


def load_adapted(
    name: str, config: str | Path | Mapping[str, Any] | None, weights: str | Path | Mapping[str, Any]
) -> StepSpec:
    """Build a package's module, load its weights and return its step.

    Args:
        name: the adapter's name.
        config: the arguments of the package's constructor, or a JSON file of them; None if the checkpoint contains all
            of them. Arguments given here override the checkpoint's.
        weights: a checkpoint of the package, read without running its code; or a state dict in memory.

    Raises:
        UsageError: there is no such adapter or package, or the config does not fit.
        CheckpointError: the file cannot be read, or its tensors are not the module's.
    """
    adapter = _module(name)
    config = _read(config)
    named = "the state dict" if isinstance(weights, Mapping) else str(weights)
    if isinstance(weights, Mapping):
        stored: Any = weights
    else:
        _refuse_folder(Path(weights))
        stored = read_stored(weights)
    split = getattr(adapter, "split", usual_split)
    try:
        state, beside = split(stored, config)
    except CheckpointError as error:
        raise CheckpointError(f"{named}: {error}") from None
    config = {**(beside or {}), **(config or {})}
    module = _built(name, adapter.build, _Config(config))
    _load(module, state, f"{named}: does not fit {name}'s {type(module).__name__} of this config")
    return _specified(name, module, config, named)


def unwrapped(stored: Any) -> Any:
    """Return the content under a key of `WRAPPERS`, up to 3 of them nested; without such a key, all content."""
    for _ in range(_NESTED):
        if isinstance(stored, Mapping):
            stored = next((stored[key] for key in WRAPPERS if isinstance(stored.get(key), Mapping)), stored)
    return stored


def package_of(name: str, config: str | Path | Mapping[str, Any] | None = None) -> str:
    """Return the package whose code an adapter runs, e.g. "x-transformers 2.31.10"; "" if none is needed or installed.

    If an adapter serves several packages, the config decides which.

    Raises:
        UsageError: the config is a file that cannot be read.
    """
    from importlib.metadata import PackageNotFoundError, version

    adapter = ADAPTERS[name].of(_read(config) or {}) if name in ADAPTERS else None
    if adapter is None or not adapter.imports:
        return ""
    if adapter.advice:  # the repository of "episodic" has no version
        return adapter.package
    if find_spec(adapter.imports) is None:
        return ""
    try:
        return f"{adapter.package} {version(adapter.package)}"
    except PackageNotFoundError:  # the package is a checkout on the path, not installed
        return adapter.package


def _read(config: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return read_config(Path(config)) if isinstance(config, str | Path) else config


def _specified(name: str, module: Any, config: Mapping[str, Any] | None, what: str) -> StepSpec:
    """Return the step of a module whose weights are finite; `what` names the weights in messages."""
    step_spec = _module(name).step_spec
    _refuse_not_finite(module, what)  # checked first, because some adapters run the module
    with own_code(f"the adapter {name} cannot read this {type(module).__name__}"):
        spec = step_spec(module, None if config is None else _Config(config))
    if spec.module is not module:
        _refuse_not_finite(spec.module, what)
    return spec


def _refuse_not_finite(module: Any, what: str) -> None:
    """Refuse weights that hold NaN, and infinite parameters; a buffer, e.g. a mask, may be infinite."""
    if not isinstance(module, nn.Module):
        return
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tensors = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    faults = [f"{key} holds NaN" for key, value in tensors.items() if value.isnan().any()]
    faults += [f"{key} holds infinity" for key, value in tensors.items() if key in parameters and value.isinf().any()]
    if faults:
        raise CheckpointError(
            f"{what}: {some(faults, 4)}, expected numbers; give weights from before the training failed"
        )


def _module(name: str) -> AdapterModule:
    if name not in ADAPTERS:
        raise UsageError(f"there is no adapter {name!r}, expected one of {', '.join(ADAPTERS)}; check --adapter")
    return cast(AdapterModule, import_module(f"txl_export.adapters.{ADAPTERS[name].module}"))


def _built(name: str, build: Callable[[Mapping[str, Any]], Any], config: _Config) -> Any:
    """Build the module; report a package that is not installed, or the constructor's error, in one line."""
    adapter = ADAPTERS[name].of(config)
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


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        inside = sorted(str(file.relative_to(path)) for ending in _ENDINGS for file in path.rglob(f"*{ending}"))
        contents = f"in it are {some(inside, 4)}" if inside else "no file in it looks like one"
        raise CheckpointError(f"{path}: is a folder, expected a file of weights, and {contents}; give that file")


def usual_split(stored: Any, _: Any) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return state dict and config of a checkpoint that is (state dict, config), or a state dict without config.

    The state dict may lie under a key of `WRAPPERS`.
    """
    config = None
    if isinstance(stored, tuple | list) and len(stored) == 2 and all(isinstance(part, Mapping) for part in stored):
        stored, config = stored
    stored = unwrapped(stored)
    if not isinstance(stored, Mapping) or not any(isinstance(value, Tensor) for value in stored.values()):
        contents = described(stored)
        if isinstance(stored, Mapping):
            wrapped = {key: stored[key] for key in WRAPPERS if not isinstance(stored.get(key, {}), Mapping)}
            strange = [f"{key} is {described(value)}" for key, value in wrapped.items()]
            contents = f"the keys {'; '.join([some([str(key) for key in stored], 4) or 'of nothing', *strange])}"
        raise CheckpointError(
            f"holds {contents}, expected tensors by name, or these under one of {', '.join(WRAPPERS)}; "
            "save model.state_dict()"
        )
    return stored, config


def _load(module: Any, state: Mapping[str, Any], what: str) -> None:
    """Load a state dict; its names must be the module's, apart from a prefix of all names, which is dropped.

    Raises:
        CheckpointError: tensors are missing, unexpected or of a different shape.
    """
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    state = _without_prefix(state, expected)
    shapes = {key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor)}
    if others := [f"{key} is {described(value)}" for key, value in state.items() if key not in shapes]:
        raise CheckpointError(f"{what}; {some(others, 4)}, expected tensors; save model.state_dict()")
    parts = {
        "missing": [key for key in expected if key not in shapes],
        "not expected": [key for key in shapes if key not in expected],
        "of another shape": [
            f"{key} is {list(shape)}, expected {list(expected[key])}"
            for key, shape in shapes.items()
            if key in expected and shape != expected[key]
        ],
    }
    if faults := [f"{kind}: {some(names, 4)}" for kind, names in parts.items() if names]:
        raise CheckpointError(f"{what}; {'; '.join(faults)}; check --config, which has to be that of the training")
    try:
        module.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from None


def _without_prefix(state: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state without a prefix that a wrapper put before every name: "module.rnn.bias" → "rnn.bias"."""
    first = next(iter(expected), "")
    names = [key.removesuffix(first) for key in state if key == first or key.endswith(f".{first}")]
    for prefix in (*names, "module."):
        cut = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if len(cut) == len(state) and (prefix == "module." or cut.keys() == expected.keys()):
            return cut
    return state
