"""ONNX files from outside: what `inspect` reads of them before anything runs, and the inputs that it would draw."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import foreign_graphs as graphs
import msgspec
from foreign_graphs import STATEFUL, STATELESS, exported
from txl_export.families.graph.find.naming import likeness
from txl_export.families.graph.find.structure import read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.open.hidden import open_hidden
from txl_export.families.graph.take.fixing import fix
from txl_export.families.graph.take.reading import copied, packed, read_foreign
from txl_export.families.graph.take.running import RunError
from txl_runtime.bundle.encoding import utf8

from fuzz.choices import Choices
from fuzz.edits import Message, edited_message, parsed
from fuzz.edits import written as encoded
from fuzz.targets.places import written

EXPORTED = ("gru cell", "lstm", "growing cache", "ring")


def one_input(data: bytes) -> None:
    """Read a file as it is, or a good one after some changes; what is read can be told, and has inputs."""
    choices = Choices(data)
    base = choices.pick(_bases())
    file = choices.rest() if choices.number(7) == 7 else encoded(edited_message(base, choices))
    foreign = read_foreign(written("foreign.onnx", file))
    names = [port.name for port in foreign.inputs]
    structure = read_structure(foreign.model.graph, foreign.inputs)
    for carried in structure.carried.values():
        assert {*carried} <= {*names}
    for given in foreign.inputs[:4]:
        for returned in foreign.outputs[:4]:
            assert likeness(given.name, returned.name) in (0, 1, 2)
    told = [foreign.inputs, foreign.outputs, structure.contexts, structure.compared, structure.random]
    msgspec.json.encode(utf8(msgspec.to_builtins(told)))
    inputs = Inputs(foreign, structure)
    for seed in range(2):
        try:
            drawn = inputs.draw(seed, dict.fromkeys(inputs.roles, 3))
        except RunError:
            return
        assert drawn.keys() == set(names)
    model, _ = fix(foreign, dict.fromkeys(names[:1], "1"))
    packed(model)
    open_hidden(model, {}, copied)  # nothing is computed here: sizes are those that the file says


def seeds() -> Iterator[bytes]:
    """Good files as they are, and with a change of each kind."""
    for number, base in enumerate(_bases()):
        yield bytes([number, 0, 0])
        for kind in range(9):
            yield bytes([number, 0, 1, kind * 11, kind * 3, kind, 1, kind, 0, 5])
            yield bytes([number, 0, 2, kind * 7, 0, kind, kind, 1, 255, 1, kind, 0, 5, 3])
        yield bytes([number, 7]) + encoded(base)[: 1 << 14]


@cache
def _bases() -> tuple[Message, ...]:
    files = [graphs.scanned(), graphs.branched(), exported(STATELESS["causal convolutions"])[0]]
    return tuple(map(parsed, [*files, *(exported(STATEFUL[name])[0] for name in EXPORTED)]))
