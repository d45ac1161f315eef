"""What a foreign ONNX file is and remembers, for `inspect`: its tables, its nodes, and what runs of it show."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
from txl_runtime.errors import CheckpointError, brief, printable
from txl_runtime.listener import Listener
from txl_runtime.sandbox.process import EndedError

from txl_export.families.graph.find.behaviour import Axes, Behaviour, Lasting, open_sizes, positions
from txl_export.families.graph.find.pairing import State, Undecided, pair
from txl_export.families.graph.find.structure import Recurrence, Structure, Window, read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.take.reading import Foreign, Port, read_foreign
from txl_export.families.graph.take.running import SECONDS, Helper, RunError, Runner


@dataclass
class GraphFacts:
    """What `inspect` says of a foreign file.

    Attributes:
        kind: "onnx".
        file, bytes: its name; its size with the weights beside it.
        producer, ir_version, opsets: what wrote it, and in which versions.
        inputs, outputs: see `Port`.
        states, undecided, data: see `Paired`.
        lasting: of each state that was followed.
        axes: see `Axes`; None where the graph did not run.
        recurrences, windows: inside the graph.
        settings: inputs that decide which branch of an If runs, with the numbers that they are compared with.
        sizes: of open axes with which it ran.
        runs: that were made.
        seconds, memory: that these may take, in seconds and bytes.
        stopped: why no more is known; "" where everything is.
        command: what to type next; "" where there is nothing to export.
        next: what can be done with the file, in words.
    """

    kind: str
    file: str
    bytes: int
    producer: str
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    states: list[State] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)
    lasting: list[Lasting] = field(default_factory=list)
    axes: Axes | None = None
    recurrences: list[Recurrence] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    settings: dict[str, list[int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    seconds: float = SECONDS
    memory: int = 0
    stopped: str = ""
    command: str = ""
    next: str = ""


def describe_graph(path: Path, heard: Listener, seconds: float = SECONDS, asked: str = "") -> GraphFacts:
    """Read a foreign ONNX file, and run its graph in a helper process.

    Args:
        path: of the file.
        heard: hears of the stages.
        seconds: that all runs may take together.
        asked: what an export is to be given, where that is another path than the file's.

    Raises:
        CheckpointError: it is no ONNX model, or none that is read here.
    """
    foreign = read_foreign(path)
    model = foreign.model
    facts = GraphFacts(
        "onnx",
        path.name,
        foreign.bytes,
        brief(printable(f"{model.producer_name or ''} {model.producer_version or ''}".strip())),
        model.ir_version or 0,
        {printable(domain) or "ai.onnx": version for domain, version in model.opset_imports.items()},
        foreign.inputs,
        foreign.outputs,
        seconds=seconds,
    )
    _nodes(model, facts)
    heard.stage("open the graph in a helper process")
    helper = Helper(foreign, seconds)
    facts.memory, sizes = helper.memory, dict[str, int]()
    try:
        with helper:
            runner = helper.open(foreign.data)
            sizes = _run(Inputs(foreign, _folded(foreign, helper, facts)), runner, facts, heard)
    except RunError as error:
        facts.stopped = f"ONNX Runtime does not run it: {error}"
    except EndedError as error:
        facts.stopped = str(error)
    if facts.states or facts.undecided or facts.stopped or _forgets(facts):
        facts.command = _command(facts, sizes, asked or str(path))
    facts.runs, facts.next = helper.runs, what_next(facts)
    return facts


def _folded(foreign: Foreign, helper: Helper, facts: GraphFacts) -> Structure:
    """The structure of the graph with constants computed, else of the file's."""
    with contextlib.suppress(RunError, CheckpointError, KeyError):
        return _nodes(helper.fold(foreign.model), facts)
    return _nodes(foreign.model, facts)


def _nodes(model: ir.Model, facts: GraphFacts) -> Structure:
    structure = read_structure(ir.to_proto(model), facts.inputs)
    facts.recurrences, facts.windows = structure.recurrences, structure.windows
    facts.settings = {name: sorted({*structure.compared.get(name, ())}) for name in sorted(structure.branching)}
    return structure


def _run(inputs: Inputs, runner: Runner, facts: GraphFacts, heard: Listener) -> dict[str, int]:
    """Open sizes that an export has to be told, with numbers that ran."""
    heard.stage("find sizes and inputs with which it runs")
    first = inputs.find(runner)
    facts.sizes = inputs.sizes
    heard.stage("pair inputs and outputs")
    again = runner.run(inputs.draw(0))
    if any(again[name].tobytes() != array.tobytes() for name, array in first.items()):
        raise EndedError("two runs with the same inputs return other numbers, so that changing one tells nothing")
    found = pair(inputs, runner, first)
    facts.states, facts.undecided, facts.data = found.states, found.undecided, found.data
    heard.stage("change sizes and single places")
    behaviour = Behaviour(inputs, runner, found.states)
    facts.axes = behaviour.axes()
    heard.stage("follow changes of states", len(found.states))
    for lasting in behaviour.lasting(heard.advance):
        facts.lasting.append(lasting)
    return open_sizes(inputs, facts.axes, positions(inputs, found.states, facts.axes, first))


def _command(facts: GraphFacts, sizes: Mapping[str, int], source: str) -> str:
    """The export to type, as far as the file tells what it needs."""
    fixed = {name: (values or [1])[0] for name, values in facts.settings.items()} | dict(sizes)
    words = ["txl-deploy", "export", source, "-o", f"{Path(source).stem}.txl".replace(":", "-")]
    words += [word for name, value in fixed.items() for word in ("--fix", f"{name}={value}")]
    words += [word for one in facts.undecided for word in ("--state", f"{one.input}={one.outputs[0]}")]
    return shlex.join([*words, "--open"] if _forgets(facts) and not facts.states else words)


def _forgets(facts: GraphFacts) -> bool:
    starts = [found for found in facts.recurrences if found.starts == "anew" and found.direction == "forward"]
    return bool(starts) or any(found.padded for found in facts.windows)


def what_next(facts: GraphFacts) -> str:
    """What can be done with a file."""
    if not facts.command:
        return "There is no state to carry from call to call: ONNX Runtime is all that this file needs."
    undecided = "What is undecided is said by --state IN=OUT, or by --state IN= where it is no state. "
    opened = "--open carries on what it forgets, unless that is meant. "
    return (
        "Whether the file equals the module that it was made of, txl-deploy verify FILE.onnx --module FILE.py:FUNCTION "
        f"tells. {undecided * bool(facts.undecided)}{opened * _forgets(facts)}docs/onnx-files.md has all options of "
        "the command that makes a bundle of it:"
    )
