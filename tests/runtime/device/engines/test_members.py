"""What the loop names of TensorRT's objects, against the member lists of seven versions; as for the build's bridge."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from stand_ins.tensorrt import VERSIONS, read_members
from txl_runtime.device.engines import running as engine_objects
from txl_runtime.device.engines.facts import find_facts

SOURCE = Path(engine_objects.__file__)
HOLDERS = {
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "config": "IRuntimeConfig",
    "cache": "IRuntimeCache",
}
OF_ANY_ENUM = {"name", "__members__"}


def used_members() -> set[str]:
    """Class.member of everything TensorRT's that the module names."""
    found = set()
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in HOLDERS:
            found.add(f"{HOLDERS[node.value.id]}.{node.attr}")
        inner = node.value
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "trt":
            found.add(f"{inner.attr}.{node.attr}")
        elif isinstance(inner, ast.Name) and inner.id == "trt":
            found.add(node.attr)
    return found


def has(member: str, classes: dict[str, list[str]], enums: dict[str, list[str]]) -> bool:
    title, _, name = member.partition(".")
    if title not in classes and title not in enums:
        return False
    return not name or name in OF_ANY_ENUM or name in {*classes.get(title, ()), *enums.get(title, ())}


def test_the_list_of_used_members_is_real():
    used = used_members()
    assert {"IExecutionContext.execute_async_v3", "Runtime.deserialize_cuda_engine", "IRuntimeCache.serialize"} <= used
    assert len(used) > 20


@pytest.mark.parametrize("name", VERSIONS)
def test_every_member_is_there_or_guarded_by_a_fact(name: str):
    classes, enums = read_members(name)
    module, version = VERSIONS[name]
    facts = find_facts("rtx" if module == "tensorrt_rtx" else "tensorrt", version)
    for member in sorted(used_members()):
        guards = {fact for named, fact in engine_objects.GUARDED.items() if named.partition(".")[0] == member}
        guard = engine_objects.GUARDED.get(member) or (guards.pop() if "." not in member and len(guards) == 1 else None)
        if guard is None or getattr(facts, guard):
            assert has(member, classes, enums), f"{VERSIONS[name]} has no {member}"


def test_no_guard_is_stale():
    lists = [read_members(name) for name in VERSIONS]
    for member in engine_objects.GUARDED:
        assert member in used_members(), f"{member} is not used any more"
        assert any(not has(member, *members) for members in lists), f"every version has {member}"


def test_only_one_module_of_the_loop_touches_tensorrt():
    for path in SOURCE.parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not any(name.startswith("tensorrt") for name in imported), path.name
        touched = any(isinstance(node, ast.Attribute) and node.attr == "module" for node in ast.walk(tree))
        assert touched == (path == SOURCE), path.name
