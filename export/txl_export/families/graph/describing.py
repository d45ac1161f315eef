"""Describes an ONNX file for `inspect`: its tables, nodes and test runs, and the command to type.

The command is tried before it is printed: the first steps of `export` run with it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir
from txl_runtime.errors import BackendError, CheckpointError, TxlError, UsageError, brief, printable
from txl_runtime.guard.forms import FORMS
from txl_runtime.listener import Listener, Silent
from txl_runtime.sandbox.process import EndedError

from txl_export.families.graph.find.behaviour import Axes, Behaviour, Lasting, open_sizes
from txl_export.families.graph.find.nodes import subgraphs
from txl_export.families.graph.find.pairing import State, Undecided, pair
from txl_export.families.graph.find.stepping import Choices, keep_outputs
from txl_export.families.graph.find.structure import Context, Structure, read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.open.hidden import Forgets, forgets
from txl_export.families.graph.take.fixing import fix
from txl_export.families.graph.take.reading import Foreign, Port, read_foreign
from txl_export.families.graph.take.running import SECONDS, Helper, RunError
from txl_export.graphs.opsets import as_standard
from txl_export.graphs.rewriting import REWRITES, full_name

TRIED = 3.0
"""Seconds of processor time for trying a command."""


@dataclass
class GraphFacts:
    """Everything that `inspect` prints about an ONNX file.

    Attributes:
        kind: "onnx".
        file, bytes: the file's name; its size, including files of weights.
        producer, ir_version, opsets: the program that wrote the file, and the versions of the format.
        inputs, outputs: names, types and shapes.
        states, undecided: the pairs that are states, and inputs that may be states.
        lasting: the number of runs for which a change of each state lasts.
        axes: the axes of sequences and positions; None if the graph did not run.
        forgets, contexts: nodes that begin anew in every call, and convolutions that read earlier positions.
        settings: inputs that decide which branch of an If runs, with the numbers that they are compared with.
        fixed: the value of each setting for which everything below was found.
        random: operators that draw random numbers, and the outputs that depend on them.
        frozen: nodes that combine constant zeros with inputs, with the operator and the shape of the zeros.
        history: an input with several positions if no output has the same number of positions; else "".
        unknown: operators that a bundle's graphs may not contain.
        sizes: sizes of open axes with which the graph ran.
        runs: the number of runs.
        seconds, memory: limits of all runs: processor time in seconds, and bytes.
        stopped: the reason why the examination stopped early; "" if it did not.
        command: the export to type; "" if there is nothing to export, or no command works.
        tried: the error when the command was tried; "" if it worked.
        next: sentences that say what can be done with the file.
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
    lasting: list[Lasting] = field(default_factory=list)
    axes: Axes | None = None
    forgets: list[Forgets] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    settings: dict[str, list[int]] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)
    random: tuple[list[str], list[str]] = ([], [])
    frozen: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    history: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    seconds: float = SECONDS
    memory: int = 0
    stopped: str = ""
    command: str = ""
    tried: str = ""
    next: str = ""


def describe_graph(
    path: Path, listener: Listener, seconds: float = SECONDS, asked: str = "", said: Mapping[str, str] | None = None
) -> GraphFacts:
    """Read a foreign ONNX file, run its graph in a helper process, and try the export command that the file needs.

    Args:
        path, listener: the file; the receiver of progress.
        seconds: processor time that all runs together may take.
        asked: the path in the printed command; "" for `path` itself.
        said: known states: for each input, the output that is its next value.

    Raises:
        CheckpointError: the file is no ONNX model, or exceeds a limit.
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
    listener.stage("open the graph in a helper process")
    choices = Choices(said or {})
    with Helper(foreign, seconds) as helper:
        facts.memory = helper.memory
        try:
            choices = _look(foreign, choices, helper, facts, listener)
        except RunError as error:
            facts.stopped = f"ONNX Runtime does not run it: {error}"
        except (EndedError, UsageError) as error:
            facts.stopped = str(error)
        facts.runs = helper.runs
    if not facts.stopped and (facts.states or facts.undecided or facts.forgets):
        listener.stage("try the export")
        _try(foreign, choices, asked or str(path), facts, said or {})
    facts.next = what_next(facts)
    return facts


def _look(foreign: Foreign, choices: Choices, helper: Helper, facts: GraphFacts, listener: Listener) -> Choices:
    """Examine a file step by step and fill `facts`; return the options that an export needs."""
    # an error here says that ONNX Runtime cannot open the file's own graph
    with helper.open(foreign.data):
        folded = _folded(foreign, helper)
    facts.frozen, structure = _nodes(foreign, facts).frozen, _nodes(folded, facts)
    facts.settings = {name: sorted({*structure.compared.get(name, ())}) for name in sorted(structure.branching)}
    # all facts below are found for the values of settings that the command will fix
    if facts.settings:
        facts.fixed = {name: (numbers or [1])[0] for name, numbers in facts.settings.items()}
        folded = _folded(foreign.of(fix(foreign, facts.fixed)[0]), helper)
        structure = _nodes(folded, facts)
    wanted = tuple(port.name for port in folded.outputs if port.name not in structure.random[1])
    if structure.random[1] and wanted:
        keep_outputs(folded, replace(choices, outputs=wanted))
        folded = folded.of(folded.model)
    inputs, runner = Inputs(folded, read_structure(folded.model.graph, folded.inputs)), helper.open(folded.model)
    listener.stage("find sizes and inputs with which it runs")
    inputs.find(runner)
    facts.sizes = inputs.sizes
    listener.stage("pair inputs and outputs")
    again = runner.run(inputs.given)
    if any(again[name].tobytes() != array.tobytes() for name, array in inputs.first.items()):
        raise EndedError("two runs with the same inputs return other numbers, so that changing one tells nothing")
    pairs = pair(inputs, runner, choices.states)
    facts.states, facts.undecided = pairs.states, pairs.undecided
    listener.stage("change sizes and single places")
    behaviour = Behaviour(inputs, runner, pairs.states)
    facts.axes = behaviour.axes()
    if pairs.states:
        listener.stage("follow changes of states", len(pairs.states))
    for lasting in behaviour.lasting(listener.advance):
        facts.lasting.append(lasting)
    known = inputs.structure.kinds.positions.items()
    longer = [name for name, axis in known if name in inputs.given and inputs.given[name].shape[axis] > 1]
    facts.history = next((name for name in longer if name not in facts.axes.positions), "")
    facts.forgets = forgets(folded.model, facts.axes.positions, helper.fold)
    returned = {state.output for state in pairs.states}
    growing = {one.input: inputs.rows_of(one.input, one.grows) for one in pairs.states if one.grows is not None}
    return replace(
        choices,
        states={**choices.states, **{one.input: one.suggested for one in pairs.undecided}},
        fix={**facts.fixed, **open_sizes(inputs, pairs.states, facts.axes)},
        outputs=tuple(name for name in wanted if name not in returned) if structure.random[1] else (),
        windows=growing,
    )


def _folded(foreign: Foreign, helper: Helper) -> Foreign:
    """Return the file with its constants computed; the unchanged file if that fails."""
    with contextlib.suppress(RunError, CheckpointError):
        return foreign.of(helper.fold(foreign.model))
    return foreign


def _nodes(foreign: Foreign, facts: GraphFacts) -> Structure:
    structure = read_structure(foreign.model.graph, foreign.inputs)
    facts.contexts, facts.random = structure.contexts, structure.random
    return structure


def _unknown(graph: ir.Graph) -> list[str]:
    """Return operators that no bundle may have and that the export does not rewrite.

    An If is not listed: it may vanish when sizes become numbers.
    """
    as_standard(graph)
    left = {full_name(node) for node in graph if not subgraphs(node) and node.op_type not in FORMS.get(node.domain, ())}
    return sorted(left - REWRITES.keys())


def _try(foreign: Foreign, choices: Choices, source: str, facts: GraphFacts, states: Mapping[str, str]) -> None:
    """Try the first steps of `export` with each possible command, and keep the first command that works."""
    from txl_export.families.graph.family import begin  # imports PyTorch, which takes seconds

    opened = bool(facts.forgets) and not any(found.fault for found in facts.forgets)
    shown = bool(facts.states or facts.undecided)
    facts.tried = "" if opened or shown else "what it forgets cannot be carried on, and it has no other state"
    for way in [replace(choices, open=True)] * opened + [choices] * shown:
        untold = {name: output for name, output in way.states.items() if name not in states}
        facts.command = shlex.join(_command(replace(way, states=untold), source))
        try:
            facts.unknown = _unknown(begin(foreign, way, Silent(), TRIED).graph.graph)
        except BackendError as error:
            facts.tried = f"not tried to its end: {error}"
            # operators of domains besides ONNX's own never vanish
            facts.unknown = [name for name in _unknown(foreign.model.graph) if "::" in name]
            facts.command = facts.command if not facts.unknown else ""
        except TxlError as error:
            facts.command, facts.tried = "", facts.tried or str(error)
            continue
        else:
            facts.command, facts.tried = facts.command if not facts.unknown else "", ""
        return


def _command(choices: Choices, source: str) -> Iterator[str]:
    """Yield the words of the export command."""
    yield from ("txl-deploy", "export", source, "-o", f"{Path(source).stem}.txl".replace(":", "-"))
    flags = {"--fix": choices.fix, "--state": choices.states, "--window": choices.windows}
    for option, values in flags.items():
        for name, value in values.items():
            yield from (option, f"{name}={value}")
    for name in choices.outputs:
        yield from ("--output", name)
    if choices.open:
        yield "--open"


def what_next(facts: GraphFacts) -> str:
    """Return sentences that say what can be done with a file."""
    if facts.stopped:
        return "What it needs is not known, so no command is printed; docs/onnx-files.md has all options of export."
    if facts.unknown:
        return (
            f"No bundle may have {', '.join(facts.unknown)}, so that an export would be refused; docs/onnx-files.md "
            "says what to do."
        )
    if not (facts.states or facts.undecided or facts.forgets):
        return (
            "No state to carry from call to call was found: where the model has none, ONNX Runtime is all that this "
            "file needs. Whether an exporter lost one, txl-deploy verify FILE.onnx --module FILE.py:FUNCTION tells."
        )
    if not facts.command:
        return f"An export was tried and refused: {facts.tried}"
    undecided = "What is undecided is answered by --state IN=OUT, or by --state IN= where it is no state. "
    opened = "--open carries on what it forgets, unless that is meant. "
    if facts.history:
        opened += (
            f"No output has as many positions as {facts.history}: where every call is given a whole history, which "
            "overlaps the one before, the file is right as it is, and --open would be wrong. "
        )
    return (
        "Whether the file equals the module that it was made of, txl-deploy verify FILE.onnx --module FILE.py:FUNCTION "
        f"tells. {undecided * bool(facts.undecided)}{opened * ('--open' in facts.command)}docs/onnx-files.md has all "
        f"options of the command that makes a bundle of it{f' ({facts.tried})' if facts.tried else ''}:"
    )
