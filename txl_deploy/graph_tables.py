"""Show an ONNX file that this project did not make: inputs, outputs, states, and nodes that forget between calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from txl_export.families.graph.describing import GraphFacts
from txl_export.families.graph.find.behaviour import Axes, Lasting
from txl_export.families.graph.find.pairing import PROOFS, State, options_of
from txl_export.families.graph.find.structure import Context
from txl_export.families.graph.open.hidden import Forgets
from txl_export.families.graph.take.reading import Port
from txl_report.numbers import counted, prefixed
from txl_runtime.errors import some

from txl_deploy.console import facts_table, rows_table, stdout


def print_graph(facts: GraphFacts) -> None:
    """Print all facts about the file."""
    opsets = ", ".join(f"{name} {version}" for name, version in facts.opsets.items())
    shown = {
        "file": f"{facts.file}, {prefixed(facts.bytes)}, an ONNX graph from outside",
        "made by": f"{facts.producer or 'not said'}; operators of {opsets}",
        **_axes(facts.axes),
    }
    for name, numbers in facts.settings.items():
        numbers_compared = f", which it compares with {', '.join(map(str, numbers))}" if numbers else ""
        shown[f"setting {name}"] = f"decides which branch runs{numbers_compared}; here {facts.fixed.get(name, 1)}"
    bounds = f"in a process of their own, which may compute for {facts.seconds:.0f} s and take {prefixed(facts.memory)}"
    sizes = ", ".join(f"{name} {size}" for name, size in facts.sizes.items())
    shown["tried"] = f"{counted(facts.runs, 'run')} {bounds}{'; ' if sizes else ''}{sizes}"
    if facts.stopped:
        shown["not known"] = f"what runs would show: {facts.stopped}"
    stdout.print(facts_table(shown))
    for title, ports in (("\ntakes", facts.inputs), ("\nreturns", facts.outputs)):
        stdout.print(rows_table((title, "\ndtype", "\nshape"), map(_row, ports)))
    lasting = {lasts.state: lasts for lasts in facts.lasting}
    if rows := [(f"{one.input} → {one.output}", _lasts(one, lasting.get(one.input))) for one in facts.states]:
        stdout.print(rows_table(("\nstate: given → returned", "\na change of it is told"), rows))
    for note in _notes(facts):
        stdout.print(f"\n{note}")
    if facts.command:
        stdout.print(f"\n{facts.command}", soft_wrap=True)  # soft_wrap adds no line ends, so that users can copy it


def _notes(facts: GraphFacts) -> Iterator[str]:
    """Yield a sentence for every finding that needs one."""
    if not facts.states:
        none = "no state: nothing that it returns was shown to be for the next call"
        yield f"whether it has a state is not known: {facts.stopped}" if facts.stopped else none
    for proof in dict.fromkeys(state.proof for state in facts.states):
        yield f"{', '.join(one.input for one in facts.states if one.proof == proof)}: paired {PROOFS[proof]}"
    if facts.undecided:
        may = "; ".join(f"{one.input} → {' or '.join(one.outputs)}" for one in facts.undecided)
        yield (
            f"undecided, because their shapes alone say it: {may}. Whoever trained the model knows; to be corrected: "
            f"{options_of(facts.undecided)}"
        )
    yield from _forgotten(facts.forgets)
    yield from map(_context, facts.contexts)
    for node, (op, sizes) in facts.frozen.items():
        yield f"{op} {node} takes zeros {[*sizes]} beside what comes in: a state may have been frozen there"
    if facts.random[0]:
        yield f"draws random numbers ({', '.join(facts.random[0])}), which reach {some(facts.random[1]) or 'nothing'}"
    if growing := [one.input for one in facts.states if one.grows is not None]:
        options = " ".join(f"--window {name}=ROWS" for name in growing)
        yield f"longer after each call: {', '.join(growing)}; the export keeps as many rows as {options} says"
    if facts.unknown:
        yield f"no bundle may have {some(facts.unknown)}"
    yield facts.next


def _lasts(state: State, lasting: Lasting | None) -> str:
    if lasting is None:
        return "not followed" if state.grows is None else "not followed, it grows"
    if not lasting.runs:
        return f"never in {counted(lasting.followed, 'run')}: a dead state"
    return (
        f"after {lasting.runs} runs still" if lasting.open and lasting.itself else f"for {counted(lasting.runs, 'run')}"
    )


def _forgotten(forgets: Sequence[Forgets]) -> Iterator[str]:
    """Yield a sentence for each kind of node that begins anew in every call, with the nodes' names."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for each in forgets:
        kinds.setdefault((each.op, each.what, each.fault), []).append(each.node)
    for (op, what, fault), nodes in kinds.items():
        yield f"forgets after each call: {op} {some(nodes)} {what}{f'; it cannot be opened: {fault}' if fault else ''}"


def _context(context: Context) -> str:
    return (
        f"context outside: convolution {context.node} reads {counted(context.before, 'position')} of {context.input} "
        f"before those that are new, of which there are multiples of {context.step}; put them in front"
    )


def _axes(axes: Axes | None) -> dict[str, str]:
    if axes is None:
        return dict.fromkeys(("sequences", "positions"), "not known")
    many = "any number" if axes.sequences is None else f"{axes.sequences}, fixed"
    apart = {
        True: ", independent of one another",
        False: f"; one reaches another through {', '.join(axes.reaching)}",
        None: "",
    }
    lengths = f"; {', '.join(map(str, axes.lengths))} of them run" if axes.lengths else ", fixed"
    along = [f"axis {axis} of {name}{lengths}" for name, axis in axes.segment.items()]
    return {"sequences": many + apart[axes.independent], "positions": [*along, "no axis of them was found"][0]}


def _row(port: Port) -> tuple[str, str, str]:
    sizes = ", ".join("?" if str(size).startswith(("input ", "output ")) else str(size) for size in port.shape)
    return port.name, port.dtype or "no tensor", f"[{sizes}]"
