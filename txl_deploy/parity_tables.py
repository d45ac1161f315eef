"""Print a verification: chains and their drift, agreement of best tokens, a text, gates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET
from rich.text import Text
from txl_report.schema.verification import VOCABULARY, Chain, Ranks, Tensor, Verification, as_size

from txl_deploy.console import curve, number, rows_table, stdout

COLOURS = {"passed": "green", "FAILED": "bold red", "not judged": "dim"}
"""Style of each verdict in the terminal."""


def print_parity(found: Verification) -> None:
    """Print the result of a verification."""
    stdout.print(f"{found.precision} on {found.backend}, against {found.reference}", soft_wrap=True)
    if found.chains:
        _print_chains(found.chains)
    if (kl := found.kl) is not None:
        decided, agreeing = (sum(getattr(chain, name) for chain in found.chains) for name in ("decided", "agreeing"))
        stdout.print(
            f"\ntop-1 {agreeing}/{decided} off near-ties · KL mean {number(kl.mean)}, "
            f"99.9 % {number(kl.late)}, max {number(kl.most)}",
            soft_wrap=True,
        )
    if found.spread is not None and found.spread.ranks is not None:
        stdout.print(_order(found.spread.ranks), soft_wrap=True)
    if (text := found.text) is not None:
        place = f" behind the {text.behind} that int4 is fitted to" if text.behind else ""
        both = f"bundle {_loss(text.runtime_nll)}, PyTorch {_loss(text.reference_nll)}"
        stdout.print(f"the text's first {text.tokens} tokens{place}: {both}", soft_wrap=True)
    if found.sensitivity:
        worst = sorted(found.sensitivity.items(), key=lambda item: -as_size(item[1]))
        stdout.print(rows_table(("quantised alone", "KL mean"), [(name, number(kl)) for name, kl in worst[:6]]))
    gates = [
        (gate.name, number(gate.value), number(gate.limit), Text(gate.verdict, COLOURS[gate.verdict]))
        for gate in found.gates
    ]
    stdout.print(rows_table(("\ngate", "\nreached", "\nlimit", "\n"), gates))
    unjudged = {gate.name for gate in found.gates if gate.passed is None}
    if unjudged - {VOCABULARY} and kl is not None and text is None:
        stdout.print("not judged without real text: give --text FILE or --tokens FILE.npy", style="dim")
    if VOCABULARY in unjudged:
        stdout.print("vocabulary not compared: give --vocabulary FILE, or a checkpoint that has one", style="dim")


def _loss(nll: float | None) -> str:
    return "no number" if nll is None else f"{nll:.7f} nats (perplexity {math.exp(min(nll, 700.0)):.6f})"


def _order(ranks: Ranks) -> str:
    """Summarise the ranks of PyTorch's best tokens, near-ties included. Shares are rounded down, so 100 % means all."""

    def share(part: int, whole: int) -> str:
        return f"{part * 10_000 // whole / 100:g} %"

    count, most = ranks.positions, list(ranks.within)[-1]
    first, among = (share(ranks.within[number], count) for number in ("1", most))
    shared = share(ranks.shared, count * ranks.best)
    return f"best token first {first}, among the first {most} {among} · {ranks.best} best shared {shared}"


def _print_chains(chains: Sequence[Chain]) -> None:
    """Print a row for every chain, a row for every output and state, and the drift of the first chain's outputs."""
    rows = [
        (
            chain.name,
            chain.streams,
            chain.segments,
            _largest(outputs := _inexact(chain.outputs)),
            number(max((sum(map(as_size, one.mean)) / max(len(one.mean), 1) for one in outputs), default=None)),
            _largest(_inexact(chain.states)),
        )
        for chain in chains
    ]
    columns = ("chain", "sequences", "segments", "outputs max", "mean", "states max")
    stdout.print(rows_table(columns, rows))
    longest = chains[0]
    compared = [
        (name, kind, _largest(tensors), _unit(tensors))
        for kind in ("output", "state")
        for name in getattr(longest, f"{kind}s")
        for tensors in [[getattr(chain, f"{kind}s")[name] for chain in chains]]
    ]
    stdout.print(rows_table(("\ncompared", "\n", "\nmax abs", "\n"), compared))
    for name, output in longest.outputs.items():
        most = list(map(as_size, output.most))
        stdout.print(curve(most, f"\ndrift: {name} max abs, {longest.name}"), soft_wrap=True)


def _inexact(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors whose errors are measured; of exact tensors, e.g. integers, different values are counted."""
    return [tensor for tensor in tensors.values() if not tensor.exact]


def _unit(tensors: Sequence[Tensor]) -> str:
    """Return the unit of a tensor's errors in all chains; for integers, also the largest value that occurred."""
    reached = [tensor.reached for tensor in tensors if tensor.reached is not UNSET]
    return tensors[0].unit + (f", reached {max(reached)}" if reached else "")


def _largest(tensors: Iterable[Tensor]) -> str:
    return number(max((as_size(tensor.largest) for tensor in tensors), default=None))
