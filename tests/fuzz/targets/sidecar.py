"""The JSON beside an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from txl_runtime.bundle.engines.files import describe_engine, engine_facts
from txl_runtime.bundle.engines.sidecar import differences, is_intact, read_sidecar

from fuzz.choices import Choices
from fuzz.edits import edited
from fuzz.targets.places import OLD, written

ENGINE = b"engine"
SHA256 = hashlib.sha256(ENGINE).hexdigest()


def one_input(data: bytes) -> None:
    """Read facts of an engine; what is accepted can be compared, told, and found not to be this engine."""
    choices = Choices(data)
    text = choices.rest() if choices.number(3) == 0 else json.dumps(edited(choices.pick(_bases()), choices)).encode()
    path, engine = written("small.json", text), written("small.engine", ENGINE)
    sidecar = read_sidecar(path)
    assert sidecar == read_sidecar(path)
    good = read_sidecar(written("good.json", json.dumps(_bases()[0]).encode()))
    for reason in differences(sidecar.identity, good.identity):
        assert "\n" not in reason, reason
    sidecar.identity.as_program()
    assert len(sidecar.identity.key) == 64
    assert is_intact(engine, sidecar) == ((sidecar.bytes, sidecar.sha256) == (len(ENGINE), SHA256))
    assert isinstance(engine_facts(sidecar), dict)
    describe_engine(engine)


def seeds() -> Iterator[bytes]:
    """Good facts as they are, and changed."""
    for number, base in enumerate(_bases()):
        yield bytes([1, number])
        yield b"\0" + json.dumps(base).encode()
        for kind in range(8):
            yield bytes([1, number, 2, kind * 3, kind, kind * 5, 1, kind, 0])


@cache
def _bases() -> tuple[Any, ...]:
    files = sorted((OLD / "tokens" / "engines").rglob("*.json"))[:2]
    return tuple(json.loads(file.read_text("utf-8")) | {"bytes": len(ENGINE), "sha256": SHA256} for file in files)
