"""Adapters in general: what a table of them promises, and a small one's whole way from a file to a step."""

from __future__ import annotations

import ast
import inspect
import json
import pickle  # noqa: TID251 - the tests write what others wrote with it
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_export
import txl_runtime
from stand_ins import small_adapter
from stand_ins.small_adapter import CONFIG, NAME, state_dict
from txl_export.adapters import registry
from txl_export.adapters.registry import WRAPPERS, adapt, load_adapted, package_of
from txl_export.adapters.table import ADAPTERS
from txl_export.families.own_module.adapted import Adapted
from txl_export.families.own_module.own_code import OwnCodeError
from txl_export.families.own_module.sources import whose_code
from txl_export.families.own_module.spec import StepSpec
from txl_runtime.errors import CheckpointError, TxlError, UsageError

FOLDER = Path(import_module("txl_export.adapters").__file__ or "").parent
ROOT = FOLDER.parents[2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a small package on the path, and its adapter in the table."""
    small_adapter.write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with small_adapter.adapter():
        yield tmp_path


# Every adapter


def functions_of(module: Path) -> set[str]:
    """Public functions of a module; none of one that is not there."""
    body = ast.parse(module.read_text()).body if module.is_file() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def lacking(name: str) -> list[str]:
    """The places that an adapter of the table still needs."""
    entry, page = ADAPTERS[name], (ROOT / "docs" / "adapters.md").read_text()
    installed = {line.partition("==")[0] for line in (ROOT / "tests" / "packages.txt").read_text().splitlines()}
    packages = {one.package for one in (entry, *entry.by_key.values()) if not one.advice} - {""}
    module, test = FOLDER / f"{entry.module}.py", Path(__file__).with_name(f"test_{entry.module}.py")
    whole = {"build", "step_spec"} <= functions_of(module) <= {"build", "step_spec", "split"}
    news = re.search(name.replace("-", "."), (ROOT / "CHANGELOG.md").read_text(), re.IGNORECASE)
    there = {
        f"export/txl_export/adapters/{entry.module}.py: build, step_spec and, for unusual files, split": whole,
        "docs/adapters.md: a line of the table": f"\n| [`{name}`](#{name}) |" in page,
        f"docs/adapters.md: the section ## {name}": f"\n## {name}\n" in page,
        f"tests/packages.txt: {' '.join(f'{one}==VERSION' for one in sorted(packages))}": packages <= installed,
        f"tests/export/adapters/{test.name}: the bundle beside the package's own loop": test.is_file(),
        "CHANGELOG.md: a line": news is not None,
    }
    return [place for place, is_there in there.items() if not is_there]


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_new_adapter_lacks_nothing(name):
    """`pytest tests/export/adapters/test_registry.py -k lacks` prints the places that are still to be written."""
    assert not (left := lacking(name)), "\n".join(["a new adapter still lacks", *left])


def test_what_a_new_adapter_lacks_is_listed():
    with small_adapter.adapter():
        assert [place.partition(":")[0] for place in lacking(NAME)] == [
            "export/txl_export/adapters/small.py",
            "docs/adapters.md",
            "docs/adapters.md",
            "tests/packages.txt",
            "tests/export/adapters/test_small.py",
        ]


def test_every_module_with_a_step_is_in_the_table():
    assert {path.stem for path in FOLDER.glob("*.py") if {"build", "step_spec"} <= functions_of(path)} == {
        entry.module for entry in ADAPTERS.values()
    }


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_registry_can_call_an_adapter(name):
    module = import_module(f"txl_export.adapters.{ADAPTERS[name].module}")
    assert list(inspect.signature(module.step_spec).parameters) == ["module", "config"]


def test_adapters_import_no_package_before_they_build():
    """Not even where it is installed: at the top of a module Python, torch, NumPy and this project are imported."""
    known = set(sys.stdlib_module_names) | {"torch", "numpy", "txl_runtime", "txl_export"}
    for path in FOLDER.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= known, path.name


def test_who_needs_no_adapter_pays_for_none():
    program = "import sys, txl_export; txl_export.ExportOptions(adapter='mamba'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name for name in done.stdout.split() if name.startswith("txl_export.adapters")}
    assert not loaded
    assert "torch" not in done.stdout.split()


# From a file to a step


def _saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def _pickled(path: Path, content: Any) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "a state dict": lambda path: _saved(path, state_dict()),
    "in memory": lambda path: state_dict(),
    **{f"under {key}": lambda path, key=key: _saved(path, {"iter": 3, key: state_dict()}) for key in WRAPPERS},
    "in one another": lambda path: _saved(path, {"model": {"state_dict": {"model": state_dict()}, "iter": 3}}),
    "of several devices": lambda path: _saved(path, {f"module.{key}": value for key, value in state_dict().items()}),
    "of a wrapper": lambda path: _saved(path, {"model": {f"a.net.{key}": v for key, v in state_dict().items()}}),
    "a pair with its config": lambda path: _saved(path, (state_dict(), {"width": 9, "scale": 9.0})),
    "a plain pickle": lambda path: _pickled(path, OrderedDict(state_dict())),
    "beside objects of unknown classes": lambda path: _pickled(path, {"model": state_dict(), "space": Unknown()}),
    "arrays": lambda path: _pickled(path, {"weights": {key: value.numpy() for key, value in state_dict().items()}}),
}


class Unknown:
    """A class that nobody who reads the file knows."""

    def __init__(self) -> None:
        self.low = np.zeros(3)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_weights_are_found(package, tmp_path, kind):
    spec = load_adapted(NAME, CONFIG, CHECKPOINTS[kind](tmp_path / "w.pt"))
    found = spec.module.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state_dict().items())
    assert spec.module.scale == 0.5, "a config that is given comes before that of the file"


def test_a_config_that_the_checkpoint_holds_need_not_be_given(package, tmp_path):
    stored = {"width": np.int64(4), "scale": np.float32(0.25), "nested": {"deep": [1, (2, None)]}}
    path = _pickled(tmp_path / "a.model", (OrderedDict(state_dict()), stored))
    with small_adapter.adapter(build=lambda config: small_adapter.build({key: config[key] for key in CONFIG})):
        spec = load_adapted(NAME, None, path)
        assert (spec.module.cell.in_features, spec.module.scale) == (4, 0.25)
        (tmp_path / "c.json").write_text('{"scale": 0.5}')
        assert load_adapted(NAME, tmp_path / "c.json", path).module.scale == 0.5
    with pytest.raises(UsageError, match="lacks width, it is empty; give the constructor's arguments"):
        load_adapted(NAME, None, state_dict())


def _without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in state_dict().items() if key not in names}


REFUSED: dict[str, tuple[Any, Any, type[TxlError], str]] = {
    "missing": (CONFIG, _without("cell.bias"), CheckpointError, r"missing: cell\.bias; check --config"),
    "unexpected": (CONFIG, {**state_dict(), "b": torch.ones(1)}, CheckpointError, "not expected: b; check --config"),
    "another size": (
        {"width": 3},
        state_dict(),
        CheckpointError,
        r"the state dict: does not fit small's Net of this config; of another shape: cell\.weight is \[4, 4\], "
        r"expected \[3, 3\], cell\.bias is \[4\], expected \[3\]",
    ),
    "all at once": (
        CONFIG,
        {**_without("cell.bias", "head.bias"), "a": torch.ones(1), "head.weight": torch.ones(1)},
        CheckpointError,
        r"missing: cell\.bias, head\.bias; not expected: a; of another shape: head\.weight is \[1\], expected \[2, 4\]",
    ),
    "no tensor": (CONFIG, {**state_dict(), "cell.bias": 3}, CheckpointError, r"cell\.bias is a int, expected tensors"),
    "no tensors": (CONFIG, {"step": 1}, CheckpointError, "holds the keys step, expected tensors by name, or"),
    "far inside": (
        CONFIG,
        {"model": {"model": {"model": {"model": state_dict()}}}},
        CheckpointError,
        "holds the keys model, expected tensors by name, or",
    ),
    "a refused config": (
        {"width": 4, "scale": -1.0},
        state_dict(),
        OwnCodeError,
        r"small: the package refuses the config: ValueError: scale is negative \(small_memory\.py:\d+",
    ),
    "an unknown argument": (
        {"width": 4, "depth": 1},
        state_dict(),
        OwnCodeError,
        "unexpected keyword argument 'depth'",
    ),
    "a config that lacks a key": ({"scale": 1.0}, state_dict(), UsageError, "the config lacks width, it has scale"),
    "a config file that is none": ("nowhere.json", state_dict(), UsageError, "nowhere.json: No such file"),
    "an option": ({"width": 4, "rings": 2}, state_dict(), UsageError, "rings is 2, whose state is not carried"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(package, case):
    config, weights, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words) as refused:
        load_adapted(NAME, config, weights)
    assert "\n" not in str(refused.value)
    if case == "a refused config":
        assert "small_memory.py" in refused.value.frames


def test_objects_in_place_of_weights_are_named(package, tmp_path):
    strange = r"an object of [\w.]+\.Unknown, not known here \(nothing was imported or run\), expected tensors"
    for content, words in (
        (({**state_dict(), "z": Unknown()}, CONFIG), f"a.pkl: does not fit .*; z is {strange}"),
        ({"weights": Unknown()}, f"a.pkl: holds the keys weights; weights is {strange}"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_adapted(NAME, CONFIG, _pickled(tmp_path / "a.pkl", content))


@pytest.mark.parametrize(("value", "words"), [("nan", "NaN"), ("inf", "infinity")])
def test_weights_that_are_no_numbers_are_named_before_the_step_is_specified(package, tmp_path, value, words):
    def step_spec(module: Any, config: Any = None) -> StepSpec:
        raise AssertionError

    weights = state_dict()
    weights["cell.weight"][1, 2] = float(value)
    module = small_adapter.build(CONFIG)
    module.load_state_dict(weights)
    with small_adapter.adapter(step_spec=step_spec):
        with pytest.raises(CheckpointError, match=rf"w\.pt: cell\.weight holds {words}, expected numbers"):
            load_adapted(NAME, CONFIG, _saved(tmp_path / "w.pt", weights))
        with pytest.raises(CheckpointError, match=f"this Net: cell.weight holds {words}, expected numbers"):
            adapt(NAME, module)


def test_a_buffer_may_be_infinite(package):
    module = small_adapter.build(CONFIG)
    module.register_buffer("mask", torch.full((2,), -torch.inf))
    assert adapt(NAME, module).module is module
    module.mask[0] = torch.nan
    with pytest.raises(CheckpointError, match="mask holds NaN"):
        adapt(NAME, module)


def test_a_folder_of_files_names_them(package, tmp_path):
    (tmp_path / "policies" / "default").mkdir(parents=True)
    (tmp_path / "policies" / "default" / "policy_state.pkl").touch()
    with pytest.raises(CheckpointError, match=r"is a folder, .* in it are policies/default/policy_state\.pkl"):
        load_adapted(NAME, CONFIG, tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        load_adapted(NAME, CONFIG, tmp_path / "none.pt")


def test_a_package_that_is_not_installed_is_named_with_what_to_do(tmp_path, monkeypatch):
    with small_adapter.adapter():
        with pytest.raises(UsageError, match=r"^small-memory is not installed; pip install small-memory$"):
            load_adapted(NAME, CONFIG, state_dict())
        assert package_of(NAME) == ""
        (tmp_path / "small_memory.py").write_text("import what_it_needs.deep")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(UsageError, match=r"^small needs what_it_needs, which is not installed; pip install"):
            load_adapted(NAME, CONFIG, state_dict())
        assert package_of(NAME) == "small-memory", "a checkout has no version"


def test_names_are_checked():
    for call in (lambda: adapt("smaal", None), lambda: load_adapted("smaal", None, {})):
        with pytest.raises(UsageError, match="there is no adapter 'smaal', expected one of x-transformers, di-"):
            call()
    assert package_of("smaal") == package_of("recurrent-policy") == ""
    assert package_of("episodic") == "episodic-transformer-memory-ppo"


def test_whose_code_runs_is_known_of_every_adapter_before_it_runs(tmp_path, monkeypatch):
    """A plain policy is this project's own; of the others one package each."""
    told = (("rsl-rl-lib", "obs_groups"), ("rl_games", "params"), ("rl_games", "network"), ("", "kind"))
    monkeypatch.setattr(registry, "find_spec", lambda name: object())
    for package, key in told:
        config = {key: {}}
        (tmp_path / "c.json").write_text(json.dumps(config))
        for given in (config, tmp_path / "c.json"):
            assert package_of("recurrent-policy", given).split(" ")[0] == package
    assert all(package_of(name) for name in ADAPTERS if name != "recurrent-policy")
    assert whose_code(Adapted("recurrent-policy", {}, {"obs_groups": {}})).startswith("rsl-rl-lib")


def test_of_an_adapter_of_several_packages_the_missing_one_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rsl_rl", None)
    config = {"obs": {"policy": 6}, "num_actions": 3, "obs_groups": {}, "actor": {}}
    with pytest.raises(UsageError, match=r"^rsl-rl-lib is not installed; pip install rsl-rl-lib$"):
        load_adapted("recurrent-policy", config, {"a": torch.ones(1)})


def test_another_package_s_module_is_refused(package):
    with pytest.raises(OwnCodeError, match=r"the adapter small cannot read this Linear: AttributeError: .* 'rings'"):
        adapt(NAME, torch.nn.Linear(2, 2))


# To a bundle


def test_it_is_exported_from_memory_and_from_files(package, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    path = _saved(tmp_path / "w.pt", state_dict())
    module = small_adapter.build(CONFIG)
    module.load_state_dict(state_dict())
    spec = txl_export.adapt(NAME, module)
    assert isinstance(spec, StepSpec)
    ours = txl_export.export(spec, tmp_path / "a.txl", batch_size=2, verify=False)
    files = txl_export.export(path, tmp_path / "b.txl", adapter=NAME, config=tmp_path / "c.json", batch_size=2)
    assert files.parity is not None
    assert files.parity.passed
    assert len(repr(files)) < 300, repr(files)
    assert re.search(r"b\.txl': fp32, B 2, step-1; [1-9]\d* gates passed\)$", repr(files))
    assert repr(ours).endswith("step-1; not verified)")
    assert files.manifest.model_id == ours.manifest.model_id
    assert files.manifest.family["module"] == "Net (adapter small, small-memory 1.2.3)"
    assert files.manifest.provenance["source"] == {"name": files.manifest.family["module"], "weights": "w.pt"}
    stream = txl_runtime.load(files.path, backend="cpu").stream()
    x, h = torch.randn(2, 4), torch.zeros(2, 4)
    for _ in range(3):
        y, h = module(x, h)
        assert np.allclose(stream.run({"x": x.numpy()})["y"], y.detach().numpy(), atol=1e-6)
    again = txl_export.verify(files.path, adapter=NAME, config=CONFIG, weights=path, segments=8)
    assert again.passed


def test_options_that_mean_nothing_for_an_adapter_are_refused(package, tmp_path):
    path = _saved(tmp_path / "w.pt", state_dict())
    out, given = tmp_path / "a.txl", {"adapter": NAME, "config": CONFIG}
    for options, words in (
        ({"memory_length": 3}, "--memory-length is for a Transformer-XL's checkpoint"),
        ({"family": "hf"}, "--family is for a Transformer-XL's checkpoint"),
        ({"precision": "int8"}, "expected fp32, fp16 or bf16"),
        ({"weights": path}, "weights are given beside an adapter's checkpoint"),
    ):
        with pytest.raises(UsageError, match=words):
            txl_export.export(path, out, **given, **options)
    spec = load_adapted(NAME, CONFIG, path)
    with pytest.raises(UsageError, match="adapter is given beside a StepSpec, expected a package's checkpoint"):
        txl_export.export(spec, out, adapter=NAME)
    with pytest.raises(UsageError, match="--config is for a Transformer-XL's checkpoint"):
        txl_export.export(spec, out, config=CONFIG)
    assert not out.exists()
