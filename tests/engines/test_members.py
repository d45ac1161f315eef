"""Nothing is called that a version of TensorRT lacks: every member the project names, against six versions' lists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import txl_engines
import txl_runtime
from stand_ins.tensorrt import VERSIONS, read_members
from txl_engines import compiler
from txl_runtime.device.engines import library, running
from txl_runtime.device.engines.library import DTYPES
from txl_runtime.device.engines.library_features import FACTS, RTX_GPUS, LibraryFeatures, find_facts
from txl_runtime.errors import BackendError

# The only modules that touch the objects of TensorRT's libraries, and the names under which they hold them.
HOLDERS = {
    Path(compiler.__file__): {
        "builder": "Builder",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "config": "IBuilderConfig",
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "inspector": "EngineInspector",
        "layer": "ILayer",
        "boundary": "IAttentionInputLayer",
        "attention": "IAttention",
        "product": "IElementWiseLayer",
        "constant": "IConstantLayer",
        "tensor": "ITensor",
        "error": "ParserError",
    },
    Path(library.__file__): {"runtime": "Runtime", "engine": "ICudaEngine"},
    Path(running.__file__): {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "context": "IExecutionContext",
        "config": "IRuntimeConfig",
        "cache": "IRuntimeCache",
    },
}
# Everything else that has attributes there is not TensorRT's; mode, dtype and value are members of enums.
OTHERS = {
    "self", "journal", "parsed", "importlib", "missing", "value", "mode", "dtype", "reasons", "library", "program",
    "spec", "types", "queue", "workspace", "wanted", "addresses", "DTYPES", "np", "logging", "logger", "text",
    "bindings", "aliases", "layers_by_name",
}  # fmt: skip
NEEDS: dict[str, str] = {
    "BuilderFlag.REQUIRE_USER_ALLOCATION": "portable",
    "ComputeCapability.__members__": "portable",
    "CudaGraphStrategy.DISABLED": "portable",
    "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE": "portable",
    "EngineInvalidityDiagnostics.__members__": "portable",
    "EngineValidity.INVALID": "portable",
    "IAttention.decomposable": "reads_in_place",
    "IAttentionInputLayer.attention": "reads_in_place",
    "IAttentionInputLayer.get_input": "reads_in_place",
    "IAttentionInputLayer.set_input": "reads_in_place",
    "IBuilderConfig.num_compute_capabilities": "portable",
    "IBuilderConfig.set_compute_capability": "portable",
    "ICudaEngine.create_runtime_config": "portable",
    "ICudaEngine.device_memory_size_v2": "portable",
    "ICudaEngine.get_aliased_input_tensor": "ring",
    "IExecutionContext.is_stream_capturable": "portable",
    "IExecutionContext.set_device_memory": "portable",
    "IRuntimeCache.deserialize": "portable",
    "IRuntimeCache.serialize": "portable",
    "IRuntimeConfig.create_runtime_cache": "portable",
    "IRuntimeConfig.cuda_graph_strategy": "portable",
    "IRuntimeConfig.set_execution_context_allocation_strategy": "portable",
    "IRuntimeConfig.set_runtime_cache": "portable",
    "LayerType.ATTENTION_INPUT": "reads_in_place",
    "Runtime.engine_header_size": "portable",
    "Runtime.get_engine_validity": "portable",
}
"""Members that some versions lack, and the fact that is true where they may be used."""

OF_ANY_ENUM = {"name", "__members__"}
OF_ANY_CLASS = {"__init__", "__class__"}
OF_THE_MODULE = {"__version__", "__name__"}


def chain(node: ast.expr) -> list[str]:
    """The names of a.b.c, outermost object first; "?" where it is no plain name."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def members_of(path: Path) -> set[str]:
    """Class.member of everything TensorRT's that a module names."""
    found: set[str] = set()
    holders = HOLDERS[path]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            for base in (names for names in map(chain, node.bases) if names[0] == "trt"):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                found |= {f"{base[1]}.{method}" for method in methods - OF_ANY_CLASS}
        if not isinstance(node, ast.Attribute):
            continue
        first, *rest = chain(node)
        place = f"{path.name}, line {node.lineno}"
        if first == "trt":
            assert len(rest) <= 2, f"{place}: {'.'.join(rest)}: hold what it returns under a name of its class"
            if len(rest) == 2 and rest[1] not in OF_ANY_CLASS:
                found.add(".".join(rest))
            elif len(rest) == 1 and rest[0] not in OF_THE_MODULE:
                found.add(rest[0])
        elif first in holders:
            assert len(rest) == 1, f"{place}: {first}.{'.'.join(rest)}: hold what it returns under a name of its class"
            found |= {f"{holders[first]}.{name}" for name in rest if name not in OF_ANY_CLASS}
        elif first == "?":
            inner = node.value
            literal = isinstance(inner, ast.Constant) or (isinstance(inner, ast.Call) and "?" not in chain(inner.func))
            assert literal, f"{place}: .{node.attr} of an expression; hold it under a name"
            assert node.attr in {"items", "join", "partition", "get"} or node.attr.startswith("_"), ast.unparse(node)
        else:
            assert first in OTHERS or first.startswith("_") or first[0].isupper(), (
                f"{place}: {ast.unparse(node)}: name a TensorRT object after its class, or add it to OTHERS"
            )
            if rest[:1] == ["module"]:
                whole = ["module"], ["module", "__name__"]
                assert rest in whole, f"{place}: {first}.module is called trt where it is used"
    return found


def used_members() -> set[str]:
    return set().union(*map(members_of, HOLDERS))


def has(member: str, classes: dict[str, list[str]], enums: dict[str, list[str]]) -> bool:
    title, _, name = member.partition(".")
    if title not in classes and title not in enums:
        return False
    return not name or name in OF_ANY_ENUM or name in {*classes.get(title, ()), *enums.get(title, ())}


def facts_of(name: str) -> LibraryFeatures:
    module, version = VERSIONS[name]
    return find_facts("rtx" if module == "tensorrt_rtx" else "tensorrt", version)


def test_the_list_of_used_members_is_real():
    used = used_members()
    assert len(used) > 70
    assert {"Builder.build_serialized_network", "OnnxParser.parse", "IProgressMonitor.step_complete"} <= used
    assert {"IExecutionContext.execute_async_v3", "Runtime.deserialize_cuda_engine", "IRuntimeCache.serialize"} <= used
    assert all(members_of(path) for path in HOLDERS)


@pytest.mark.parametrize("name", VERSIONS)
def test_every_member_is_there_or_guarded_by_a_fact(name: str):
    classes, enums = read_members(name)
    facts = facts_of(name)
    for member in sorted(used_members()):
        guard = NEEDS.get(member)
        if guard is None:
            guards = {need for named, need in NEEDS.items() if named.partition(".")[0] == member}
            guard = guards.pop() if "." not in member and len(guards) == 1 else None
        if guard is None or getattr(facts, guard):
            assert has(member, classes, enums), f"{VERSIONS[name]} has no {member}"


@pytest.mark.parametrize("name", VERSIONS)
def test_facts_are_what_the_lists_say(name: str):
    classes, enums = read_members(name)
    facts = facts_of(name)
    assert facts.ring == ("add_kv_cache_update" in classes["INetworkDefinition"])
    assert facts.ring == ("KV_CACHE_UPDATE" in enums["LayerType"])
    assert facts.portable == ("ComputeCapability" in enums)
    if facts.portable:
        numbers = {int(member[2:]) for member in enums["ComputeCapability"] if member.startswith("SM")}
        assert numbers == set(facts.gpus) == set(RTX_GPUS)
        assert "MALFORMED_ENGINE" in enums["EngineInvalidityDiagnostics"]
    assert set(DTYPES) <= set(enums["DataType"])
    assert {"INPUT", "OUTPUT"} <= set(enums["TensorIOMode"])


def test_no_guard_is_stale():
    used = used_members()
    lists = {name: read_members(name) for name in VERSIONS}
    for member, fact in NEEDS.items():
        assert member in used, f"{member} is not used any more"
        assert isinstance(getattr(FACTS[0], fact), bool), fact
        assert any(not has(member, *lists[name]) for name in VERSIONS), f"every version has {member}"


def test_only_these_modules_touch_tensorrt():
    for package in (txl_engines, txl_runtime):
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            source = path.read_text()
            tree = ast.parse(source)
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            named = {alias.name for node in imports for alias in node.names}
            assert not any(name.startswith("tensorrt") for name in named), path.name
            if package is txl_engines or "engines" in path.parts:
                touched = any(isinstance(node, ast.Attribute) and node.attr == "module" for node in ast.walk(tree))
                assert touched == (path in HOLDERS), path.name
                assert "getattr(" not in source.replace("getattr(found, name), getattr(wanted, name)", ""), path.name
                assert "hasattr(" not in source, path.name


def test_rows_are_in_order_and_old_versions_are_refused():
    for target in ("tensorrt", "rtx"):
        rows = [row.since for row in FACTS if row.target == target]
        assert rows == sorted(rows)
    assert find_facts("tensorrt", "10.14.1.48").ring is False
    assert find_facts("tensorrt", "10.15.0").ring is True
    assert find_facts("tensorrt", "12.1").opset == 25, "what is newer is taken for the newest known"
    with pytest.raises(BackendError, match=r"tensorrt is 8\.6\.2, expected 10\.0 or newer; upgrade it"):
        find_facts("tensorrt", "8.6.2")
    with pytest.raises(BackendError, match=r"expected 1\.7 or newer"):
        find_facts("rtx", "1.2.0")
