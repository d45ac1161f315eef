"""A verification, drawn: the gates, the chains and the drift curves."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from txl_deploy.console import curve, number, rows_table, stdout

COLOURS = {"passed": "green", "FAILED": "bold red", "not judged": "dim"}


def print_parity(document: dict[str, Any]) -> None:
    """Print what `Parity.document` holds."""
    stdout.print(f"{document['precision']} on {document['backend']}, against {document['reference']}", soft_wrap=True)
    chains = document["chains"]
    if chains:
        (_print_steps if "outputs" in chains[0] else _print_memory)(chains)
    if kl := document["kl"]:
        decided, agreeing = (sum(chain[key] for chain in chains) for key in ("decided", "agreeing"))
        stdout.print(
            f"\ntop-1 {agreeing}/{decided} off near-ties · KL mean {number(kl['mean'])}, "
            f"99.9 % {number(kl['p99.9'])}, max {number(kl['max'])}",
            soft_wrap=True,
        )
    if ranks := (document.get("spread") or {}).get("ranks"):
        stdout.print(_order(ranks), soft_wrap=True)
    if document["text"]:
        text = document["text"]
        stdout.print(
            f"text of {text['tokens']} tokens: nll {text['runtime_nll']:.7f}, PyTorch {text['reference_nll']:.7f}",
            soft_wrap=True,
        )
    if document.get("sensitivity"):
        worst = sorted(document["sensitivity"].items(), key=lambda item: -item[1])
        stdout.print(rows_table(("quantised alone", "KL mean"), [(name, number(kl)) for name, kl in worst[:6]]))
    gates = [
        (
            gate["name"],
            number(gate["value"]),
            number(gate["limit"]),
            Text(gate["verdict"], COLOURS[gate["verdict"]]),
        )
        for gate in document["gates"]
    ]
    stdout.print(rows_table(("\ngate", "\nreached", "\nlimit", "\n"), gates))
    if any(gate["verdict"] == "not judged" for gate in document["gates"]) and kl and not document["text"]:
        stdout.print("not judged without real text: give --text FILE or --tokens FILE.npy", style="dim")


def _order(ranks: dict[str, Any]) -> str:
    """Where PyTorch's best tokens stand, near-ties included, in one line; what is not all of them is no 100 %."""

    def share(part: int, whole: int) -> str:
        return f"{part * 10_000 // whole / 100:g} %"

    count, most = ranks["positions"], list(ranks["within"])[-1]
    first, among = (share(ranks["within"][number], count) for number in ("1", most))
    shared = share(ranks["shared"], count * ranks["best"])
    return f"best token first {first}, among the first {most} {among} · {ranks['best']} best shared {shared}"


def _print_memory(chains: list[dict[str, Any]]) -> None:
    """The chains of a Transformer-XL: log-probabilities and memory."""
    columns = ("chain", "streams", "segments", "log-probs max", "mean", "memory max")
    rows = [
        (
            chain["name"],
            chain["streams"],
            chain["segments"],
            number(chain["max_logprobs"]),
            number(sum(chain["mean_logprobs"]) / max(chain["segments"], 1)),
            number(chain["max_memory"]),
        )
        for chain in chains
    ]
    stdout.print(rows_table(columns, rows))
    longest = chains[0]
    stdout.print(curve(longest["max_per_segment"], f"\ndrift: log-probs max abs, {longest['name']}"), soft_wrap=True)


def _print_steps(chains: list[dict[str, Any]]) -> None:
    """The chains of any other step: every output and every state by name."""
    rows = [(chain["name"], chain["streams"], chain["segments"]) for chain in chains]
    stdout.print(rows_table(("chain", "sequences", "segments"), rows))
    longest = chains[0]
    found = [
        (name, kind, number(max(chain[f"{kind}s"][name]["largest"] for chain in chains)))
        for kind in ("output", "state")
        for name in longest[f"{kind}s"]
    ]
    stdout.print(rows_table(("\ncompared", "\n", "\nmax abs, relative"), found))
    for name, output in longest["outputs"].items():
        stdout.print(curve(output["most"], f"\ndrift: {name} max abs, {longest['name']}"), soft_wrap=True)
