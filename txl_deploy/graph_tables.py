"""An ONNX file from outside, shown: what it takes and returns, what it remembers, and what it forgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from txl_export.families.graph.behaviour import Axes, Lasting
from txl_export.families.graph.describing import GraphFacts
from txl_export.families.graph.pairing import PROOFS, State
from txl_export.families.graph.reading import Port
from txl_export.families.graph.structure import Recurrence, Window
from txl_report.numbers import counted, prefixed
from txl_runtime.errors import some

from txl_deploy.console import facts_table, rows_table, stdout


def print_graph(facts: GraphFacts) -> None:
    """Print everything that is known of a file."""
    opsets = ", ".join(f"{name} {version}" for name, version in facts.opsets.items())
    shown = {
        "file": f"{facts.file}, {prefixed(facts.bytes)}, an ONNX graph from outside",
        "made by": f"{facts.producer or 'not said'}; operators of {opsets}",
        **_axes(facts.axes),
    }
    for name, numbers in facts.settings.items():
        told = f", which it compares with {', '.join(map(str, numbers))}" if numbers else ""
        shown[f"setting {name}"] = f"decides which branch runs{told}"
    sizes = ", ".join(f"{name} {size}" for name, size in facts.sizes.items())
    shown["tried"] = (
        f"{counted(facts.runs, 'run')} in a process of their own, which may take {facts.seconds:.0f} s and "
        f"{prefixed(facts.memory)}" + (f"; {sizes}" if sizes else "")
    )
    if facts.stopped:
        shown["not known"] = f"what runs would show: {facts.stopped}"
    stdout.print(facts_table(shown))
    for title, ports in (("\ntakes", facts.inputs), ("\nreturns", facts.outputs)):
        stdout.print(rows_table((title, "\ndtype", "\nshape"), map(_row, ports)))
    _print_states(facts)
    for note in (*_undecided(facts), *_forgotten(facts.recurrences), *map(_window, facts.windows)):
        stdout.print(f"\n{note}")
    stdout.print(f"\n{facts.next}")


def _print_states(facts: GraphFacts) -> None:
    if not facts.states:
        stdout.print("\nno state: nothing that it returns was shown to be for the next call")
        return
    lasting = {found.state: found for found in facts.lasting}
    rows = [(f"{state.input} → {state.output}", _lasts(state, lasting.get(state.input))) for state in facts.states]
    stdout.print(rows_table(("\nstate: given → returned", "\na change of it is told"), rows))
    for proof in dict.fromkeys(state.proof for state in facts.states):
        names = ", ".join(state.input for state in facts.states if state.proof == proof)
        stdout.print(f"\nproof of {names}: {PROOFS[proof]}")


def _lasts(state: State, found: Lasting | None) -> str:
    if found is None:
        return "not followed" if state.grows is None else "not followed, it grows"
    if not found.runs:
        return f"never in {counted(found.followed, 'run')}: a dead state"
    return f"after {found.runs} runs still" if found.open and found.itself else f"for {counted(found.runs, 'run')}"


def _undecided(facts: GraphFacts) -> Iterator[str]:
    for found in facts.undecided:
        yield f"undecided: {found.input} → {' or '.join(found.outputs)}: {found.why}."
    for name, why in facts.data.items():
        yield f"no state: {name} {why}"


def _forgotten(found: Sequence[Recurrence]) -> Iterator[str]:
    """What begins anew in every call, nodes of one kind in one sentence."""
    kinds: dict[tuple[str, int, str, str], list[str]] = {}
    for each in found:
        if each.starts == "anew":
            kinds.setdefault((each.op, each.hidden, each.direction, each.branch), []).append(each.node)
    for (op, hidden, direction, branch), nodes in kinds.items():
        size = f", hidden size {hidden}" if hidden else ""
        where = f", in one branch of {branch} alone" if branch else ""
        way = "" if direction == "forward" else f", {direction}: it cannot be opened"
        yield f"forgets after each call: {op} node {some(nodes)}{size}{where}{way}"


def _window(found: Window) -> str:
    what = counted(found.before, "position")
    if found.padded:
        return f"forgets after each call: convolution {found.node} has zeros for {what} of the call before"
    return (
        f"context outside: convolution {found.node} reads {what} of {found.input} before those that are new, of which "
        f"there are multiples of {found.step}; put them in front"
    )


def _axes(axes: Axes | None) -> dict[str, str]:
    if axes is None:
        return dict.fromkeys(("sequences", "positions"), "not known")
    many, positions = (
        "any number" if axes.sequences is None else f"{axes.sequences}, fixed",
        "no axis of them was found",
    )
    if axes.independent is not None:
        reaching = f"; one reaches another through {', '.join(axes.reaching)}"
        many += ", independent of one another" if axes.independent else reaching
    for name, axis in islice(axes.segment.items(), 1):
        lengths = f"; {', '.join(map(str, axes.lengths))} of them run" if axes.lengths else ", fixed"
        positions = f"axis {axis} of {name}{lengths}"
    return {"sequences": many, "positions": positions}


def _row(port: Port) -> tuple[str, str, str]:
    sizes = ", ".join("?" if str(size).startswith(("input ", "output ")) else str(size) for size in port.shape)
    return port.name, port.dtype or "no tensor", f"[{sizes}]"
