"""A verification, drawn: the gates, the chains and the drift curve."""

from __future__ import annotations

from typing import Any

from txl_deploy.console import curve, number, rows_table, stdout


def print_parity(document: dict[str, Any]) -> None:
    """Print what `Parity.document` holds."""
    stdout.print(f"{document['precision']} on {document['backend']}, against {document['reference']}", soft_wrap=True)
    chains = document["chains"]
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
    decided, agreeing = (sum(chain[key] for chain in chains) for key in ("decided", "agreeing"))
    kl = document["kl"]
    stdout.print(
        f"\ntop-1 {agreeing}/{decided} off near-ties · KL mean {number(kl['mean'])}, "
        f"99.9 % {number(kl['p99.9'])}, max {number(kl['max'])}",
        soft_wrap=True,
    )
    if document["text"]:
        text = document["text"]
        stdout.print(
            f"text of {text['tokens']} tokens: nll {text['runtime_nll']:.7f}, PyTorch {text['reference_nll']:.7f}",
            soft_wrap=True,
        )
    if document.get("sensitivity"):
        worst = sorted(document["sensitivity"].items(), key=lambda item: -item[1])
        stdout.print(rows_table(("quantised alone", "KL mean"), [(name, number(kl)) for name, kl in worst[:6]]))
    colours = {"passed": "green", "FAILED": "bold red", "not judged": "dim"}
    gates = [
        (
            gate["name"],
            number(gate["value"]),
            number(gate["limit"]),
            f"[{colours[gate['verdict']]}]{gate['verdict']}[/]",
        )
        for gate in document["gates"]
    ]
    stdout.print(rows_table(("gate", "reached", "limit", ""), gates))
    if not document["text"]:
        stdout.print("not judged without real text: give --text FILE or --tokens FILE.npy", style="dim")
