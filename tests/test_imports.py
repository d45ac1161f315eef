"""Imports: all arrows of the house, the third parties of each package, what an application carries."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import pytest
import txl_export
import txl_runtime
from frozen import frozen
from step_models import B, counting
from txl_export.adapters.table import ADAPTERS

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "txl_runtime": ROOT / "runtime",
    "txl_engines": ROOT / "export",
    "txl_export": ROOT / "export",
    "txl_report": ROOT / "export",
    "txl_deploy": ROOT,
}

ARROWS: dict[str, set[str]] = {
    "txl_runtime": set(),
    "txl_engines": {"txl_runtime"},
    "txl_report": {"txl_runtime"},
    "txl_export": {"txl_runtime", "txl_report"},
    "txl_deploy": {"txl_runtime", "txl_engines", "txl_export", "txl_report"},
}
"""The packages that each package may import."""

ANYWHERE = {"errors", "types", "listener", "files", "installing", "system"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "listener": set(),
    "system": set(),
    "files": {"system"},
    "installing": set(),
    "update_rules": ANYWHERE,
    "ladder": ANYWHERE,
    "starting": set(),
    "sandbox": {"starting"} | ANYWHERE,
    "bundle": ANYWHERE,
    "guard": {"bundle"} | ANYWHERE,
    "streaming": {"bundle"} | ANYWHERE,
    "host": {"streaming", "guard", "bundle", "update_rules", "sandbox"} | ANYWHERE,
    "device": {"streaming", "guard", "bundle", "update_rules"} | ANYWHERE,
    "native": {"host", "streaming", "bundle"} | ANYWHERE,
    "model": {"streaming", "bundle", "host", "device", "native", "sandbox"} | ANYWHERE,
    "sessions": {"model", "streaming", "bundle"} | ANYWHERE,
    "selftest": {"model", "ladder"} | ANYWHERE,
}
"""The rooms of the runtime that each may import: streaming knows no engine, host and device do not know each other.
The compiled step runs in the host's loop."""

THIRD_PARTIES = {
    "txl_runtime": {"numpy", "msgspec", "safetensors", "onnxruntime"},
    "txl_engines": {"numpy", "msgspec", "onnx", "google", "filelock"},
    "txl_deploy.bench": {"numpy", "msgspec"},
    "txl_deploy.triton.inside": {"numpy"},
}
"""The third parties that some packages and rooms import, wherever in a module; tensorrt is looked up by name."""

CARRIED = {"bundle", "errors", "files", "guard", "host", "installing", "model", "streaming", "system", "types"}
CARRIED |= {"update_rules"}
"""The rooms that an application enters which loads any bundle on the CPU and streams: whoever embeds the runtime reads
these. `guard` stands apart from the rest: only the engine's module enters it, to have a graph checked, and what makes
another graph of one that was checked."""
DOORS = {
    "bundle.manifest": {"bundle.transformer_xl"},
    "bundle.reading": {"bundle.vocabulary"},
    "device.choosing": {"device.onnxruntime_cuda", "device.engines.opening"},
    "host.backend": {"host.trial"},
    "model": {"device.choosing", "native.opening", "streaming.ranking"},
    "streaming.snapshot": {"bundle.writing", "streaming.state_files"},
    "streaming.stream": {
        "streaming.adjusting",
        "streaming.datastore",
        "streaming.generation",
        "streaming.lookup",
        "streaming.sampling",
        "streaming.texts",
    },
}
"""Imports inside functions: the doors of what an application enters only where it asks for it. These are a
Transformer-XL's config, vocabularies, a device, a compiled step, states in files, a trial, drawing tokens, drafts of
them, text, and ranking. No other function imports."""

MODELS = re.compile(
    r"gtrxl|rwkv|compressive|xlnet|memformer|infini.?(trans|att)|memorizing|block.recurrent|labml|\bding\b|torchaudio"
    r"|\blstm|\bgru\b|\brmt|adaptive.span|universal|lucid"
    rf"|\b({'|'.join(ADAPTERS).replace('-', '.')})",
    re.IGNORECASE,
)
"""Models and packages that the exporter knows, or that its adapters do."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)

# The packages that the runtime may load, beside the standard library. typing_extensions is msgspec's, if installed;
# flatbuffers, packaging and google (protobuf) are ONNX Runtime's declared needs.
RUNTIME = {"txl_runtime", "numpy", "msgspec", "typing_extensions"}
ENGINE = {"onnxruntime", "flatbuffers", "packaging", "google"}
ALLOWED = RUNTIME | ENGINE | {"safetensors"}

EVERYTHING = """
import numpy as np
import txl_runtime
from txl_runtime.selftest import run_selftest

model = txl_runtime.load(bundle)
stream = model.stream()
assert model.vocabulary is not None
text = np.tile(model.vocabulary.encode(b"nothing but numpy"), (stream.batch_size, 1))
first = stream.feed(text)
stream.score(text)
stream.snapshot().save(place)
tokens = list(stream.generate(text, 5, seed=1))
stream.restore(txl_runtime.StreamState.load(place))
assert all((a == b).all() for a, b in zip(tokens, stream.generate(text, 5, seed=1), strict=True))
stream.select([0])
stream.reset()
model.bundle.report()
run_selftest(model).require()
try:
    txl_runtime.load(place)
except txl_runtime.TxlError:
    pass
"""


def loaded_by(code: str, **names: str) -> set[str]:
    """Top-level names of the modules that some code loads in a process of its own, the standard library's aside."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    program = f"import sys\nbefore = set(sys.modules)\n{given}{code}\nimport json\n"
    program += "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout)) - set(sys.stdlib_module_names)
    return {name for name in found if not name.startswith(("_cython_", "cython_runtime"))}  # NumPy's, without a file


MODULES = {
    ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
    for package, folder in PACKAGES.items()
    for path in sorted((folder / package).rglob("*.py"))
}


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Yield the imports of a module, in functions and for type checkers too; and whether only a function has it."""
    tree = ast.parse(MODULES[module].read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    later = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in later) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name if name in MODULES else str(node.module), id(node) in later) for name in names)


@cache
def all_imports() -> dict[str, list[tuple[str, bool]]]:
    """Every module's imports, found in the one process that runs these tests: it takes seconds."""
    return {module: sorted(set(imports(module))) for module in MODULES}


def room(module: str) -> str:
    """errors of txl_runtime.errors, bundle of txl_runtime.bundle.manifest."""
    return module.split(".")[1]


def test_packages_import_only_those_below_them():
    wrong = [
        f"{module} imports {target}"
        for module, targets in all_imports().items()
        for target, _ in targets
        if (package := target.partition(".")[0]) in PACKAGES
        and package not in {module.partition(".")[0]} | ARROWS[module.partition(".")[0]]
    ]
    assert not wrong


def test_rooms_of_the_runtime_import_only_those_below_them():
    inside = {module: targets for module, targets in all_imports().items() if module.startswith("txl_runtime.")}
    wrong = [
        f"{module} imports {target}"
        for module, targets in inside.items()
        for target, _ in targets
        if target.startswith("txl_runtime") and room(target + ".") not in {room(module)} | ROOMS[room(module)]
    ]
    assert not wrong
    assert {room(module) for module in inside} == set(ROOMS)


def test_the_runtime_names_no_model():
    """Not in a comment either. Of a Transformer-XL's, its config and the manifest that has it know."""
    known = {"txl_runtime.bundle.transformer_xl", "txl_runtime.bundle.manifest"}
    found, in_code = [], set()
    for module in MODULES:
        if module.startswith("txl_runtime"):
            text = MODULES[module].read_text()
            if module != "txl_runtime.guard.forms":  # some of the standard's are called as models are
                found += [f"{module}: {name[0]}" for name in MODELS.finditer(text)]
            docs = {
                ast.get_docstring(node, False) for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)
            }
            for token in tokenize.generate_tokens(iter(text.splitlines(True)).__next__):
                said = token.type in (tokenize.NAME, tokenize.STRING) and token.string.strip('"') not in docs
                if said and re.search("transformer", token.string, re.IGNORECASE):
                    in_code.add(module)
    assert not found
    assert in_code == known


def test_no_module_imports_itself_in_a_circle():
    """Neither at once, nor through imports in functions or for type checkers."""
    graph = {
        module: {target for target, _ in targets if target in MODULES} for module, targets in all_imports().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


@pytest.mark.parametrize("place", THIRD_PARTIES)
def test_a_package_imports_the_third_parties_it_is_known_to_need(place):
    found = {
        name
        for module, targets in all_imports().items()
        if (module == place or module.startswith(f"{place}.")) and "txl_deploy.bench.competitors" not in module
        for name in (target.partition(".")[0] for target, _ in targets)
        if name not in PACKAGES and name not in sys.stdlib_module_names
    }
    assert found == THIRD_PARTIES[place]


def test_what_begins_with_an_underscore_is_for_its_own_module():
    wrong = [
        f"{module} imports {target.module}.{alias.name}"
        for module, path in MODULES.items()
        for target in ast.walk(ast.parse(path.read_text()))
        if isinstance(target, ast.ImportFrom) and (target.module or "").partition(".")[0] in PACKAGES
        for alias in target.names
        if alias.name.startswith("_")
    ]
    assert not wrong


def test_public_methods_and_functions_say_what_they_do():
    """In their own words, or in those of the protocol that they implement."""
    silent = []
    for module in MODULES:
        if not module.endswith("__main__"):
            imported = importlib.import_module(module)
            own = {name: thing for name, thing in vars(imported).items() if getattr(thing, "__module__", "") == module}
            public = {name: thing for name, thing in own.items() if not name.startswith("_")}
            for name, thing in public.items():
                methods = vars(thing) if inspect.isclass(thing) else {}
                named = {f"{name}.{key}": getattr(thing, key) for key in methods if not key.startswith("_")}
                called = {key: value for key, value in {name: thing, **named}.items() if inspect.isroutine(value)}
                silent += [
                    f"{module}.{key}" for key, value in called.items() if not inspect.getdoc(getattr_doc(thing, key))
                ]
    assert not silent


def getattr_doc(thing: object, key: str) -> object:
    """The function itself, or the method of a class, which may have its docstring from a base."""
    return getattr(thing, key.partition(".")[2]) if "." in key else thing


def carried_by(code: str) -> set[str]:
    """The modules of the runtime that some code loads in a process of its own."""
    told = 'print(*(name for name in sys.modules if name.startswith("txl_runtime")))'
    program = f"import sys\nimport numpy as np\nimport txl_runtime\n{code}\n{told}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_doors_are_all_that_functions_of_the_runtime_import():
    found: dict[str, set[str]] = {}
    for module in MODULES:
        if module.startswith("txl_runtime"):
            for target, later in all_imports()[module]:
                if later and target.startswith("txl_runtime"):
                    door, opened = (name.removeprefix("txl_runtime.") for name in (module, target))
                    found.setdefault(door, set()).add(opened)
    assert found == DOORS


def test_the_guard_is_entered_where_an_engine_gets_a_graph():
    inside = {
        module for module, targets in all_imports().items() if any("txl_runtime.guard" in name for name, _ in targets)
    }
    assert {name for name in inside if name.startswith("txl_runtime") and ".guard" not in name} == {
        "txl_runtime.device.onnxruntime_cuda",
        "txl_runtime.host.idle_masks",
        "txl_runtime.host.onnxruntime_cpu",
    }


def test_what_an_application_carries(tmp_path):
    """The same rooms whatever the model is, and nothing that lies behind a door."""
    counting().write(tmp_path / "step.txl")
    streams = {
        frozen("ring"): "feed(np.zeros((3, 6), np.int32))",
        tmp_path / "step.txl": f"run({{'tokens': np.zeros(({B}, 4), np.int32)}})",
    }
    behind = {f"txl_runtime.{target}" for targets in DOORS.values() for target in targets}
    for bundle, call in streams.items():
        loaded = carried_by(f"txl_runtime.load({str(bundle)!r}, backend='cpu').stream().{call}")
        assert {room(name) for name in loaded - {"txl_runtime"}} == CARRIED
        assert not loaded & behind


def test_importing_the_runtime_loads_no_engine_and_nothing_that_is_not_its_own():
    loaded = loaded_by("import txl_runtime")
    assert loaded >= {"txl_runtime", "numpy", "msgspec"}
    assert loaded <= RUNTIME


def test_a_whole_stream_loads_nothing_but_the_runtime_and_its_engine(tmp_path):
    bundle = frozen("clusters")
    loaded = loaded_by(EVERYTHING, bundle=str(bundle), place=str(tmp_path / "a.state"))
    assert loaded >= {"txl_runtime", "numpy", "msgspec", "onnxruntime", "safetensors"}
    assert loaded <= ALLOWED
    assert not loaded & {"torch", "onnx", "onnxscript", "onnx_ir", "typer", "rich", "txl_export", "txl_deploy"}


def test_every_module_of_the_runtime_can_be_imported_alone_without_an_engine():
    folder = Path(txl_runtime.__file__).parent
    paths = [path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")]
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    assert "txl_runtime.host.onnxruntime_cpu" in names
    assert loaded_by("".join(f"import {name}\n" for name in names)) <= RUNTIME


def test_the_engine_is_missed_by_name():
    code = """
import txl_runtime
sys.modules["onnxruntime"] = None
try:
    txl_runtime.load(bundle)
except txl_runtime.BackendError as error:
    assert "onnxruntime is not installed" in str(error) and "[cpu]'" in str(error), error
else:
    raise AssertionError("loaded without an engine")
del sys.modules["onnxruntime"]
"""
    assert "onnxruntime" not in loaded_by(code, bundle=str(frozen("ring")))


@pytest.mark.parametrize("package", [txl_runtime, txl_export], ids=lambda package: package.__name__)
def test_what_is_public_is_what_is_listed(package):
    public = {
        name
        for name, value in {**vars(package), **{name: getattr(package, name) for name in package.__all__}}.items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert package.__all__ == sorted(package.__all__, key=lambda name: (not name[0].isupper(), name))
    assert set(package.__all__) == public


def test_whoever_loads_a_bundle_finds_the_options_that_the_page_has():
    parameters = inspect.signature(txl_runtime.load).parameters
    options = ["backend", "threads", "verify_files", "update", "lean", "forms", "trial", "huge_pages"]
    assert [*parameters] == ["path", *options]


def test_a_model_says_what_it_is():
    model = txl_runtime.load(frozen("ring"))
    assert (model.vocab_size, model.memory_length, model.batch_size) == (41, 6, 3)
    assert model.segment_lengths == (4, 1), "largest first"
    assert model.vocabulary is not None
    assert np.asarray(model.stream().fill).tolist() == [0, 0, 0]
