"""Reads YAML of strangers: texts, lists and tables within limits. Tags make no objects, so nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from txl_runtime.errors import BackendError
from txl_runtime.installing import pip_line

MOST_BYTES, MOST_PARTS, DEEPEST, LONGEST = 2**20, 2**16, 32, 64
"""Limits of a YAML file: bytes, parts (an alias counts as all parts that it stands for), depth, characters of a number.

A number in base 60, such as 1:30:00, is limited because the time to read it grows with the square of its length.
"""


def read_yaml(table: Path, text: str, typed: bool = False) -> Any:
    """Return the content of a YAML text: scalars are texts; with `typed` they are numbers, booleans, None or texts.

    A tag such as `!!python/tuple` is ignored: the list, table or text behind the tag is read.

    Raises:
        BackendError: PyYAML is not installed.
        ValueError: the text is no YAML, too large or too deep.
    """
    try:
        import yaml  # comes with the extra "leapp"
    except ModuleNotFoundError:
        raise BackendError(f"{table}: to read it takes PyYAML, not installed here; {pip_line('leapp')}") from None
    loader, parts, sizes, around = getattr(yaml, "CBaseLoader", yaml.BaseLoader), 0, dict[str, int](), []

    class Typed(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """A loader that types scalars by their spelling and ignores tags."""

        def construct_scalar(self, node: Any) -> Any:
            if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST:
                raise ValueError(f"a number of {len(node.value)} signs, expected up to {LONGEST}")
            return super().construct_scalar(node)

    def untagged(reader: Any, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return reader.construct_mapping(node, deep=True)
        return reader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else node.value

    Typed.add_constructor(None, untagged)
    try:
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.CollectionStartEvent):
                around.append((event.anchor, parts))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = around.pop()
                sizes[anchor] = parts - before
            parts += sizes.get(event.anchor, MOST_PARTS) if isinstance(event, yaml.AliasEvent) else 1
            # nested aliases in a small file can stand for millions of parts
            if parts > MOST_PARTS or len(around) > DEEPEST:
                raise ValueError(f"more than {MOST_PARTS} parts, or {DEEPEST} in one another, or one in itself")
        return yaml.load(text, Typed if typed else loader)  # noqa: S506 - neither makes objects
    except (yaml.YAMLError, TypeError, RecursionError) as error:  # TypeError: a list as a key
        raise ValueError(str(error)) from None
    except (AttributeError, LookupError) as error:  # raised for "!!timestamp foo", "!!bool foo", "!!int ''"
        raise ValueError(f"a value is not of its tag's kind: {type(error).__name__}: {error}") from None
