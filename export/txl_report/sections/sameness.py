"""Show whether the bundle is the same model: gates with their limits, chains, histograms of errors, ranks, a text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from txl_report.blocks import Badge, Block, Figure, Heading, Pairs, Paragraph, Section, State
from txl_report.charts.bars import Bar, named_bars
from txl_report.facts.gathering import Facts
from txl_report.facts.plain import Missing, some
from txl_report.numbers import counted, fixed, number, power_of_ten, share, whole
from txl_report.schema.verification import Chain, Counts, Edges, Gate, Ranks, Spread, Text, Unit, Verification, as_size
from txl_report.sections.common import gap, table
from txl_report.sections.drift import drift

MOST_SPREAD = 8
"""Maximum number of compared tensors whose errors are shown."""
STATES: dict[bool | None, tuple[State, str]] = {
    True: ("passed", "passed"),
    False: ("failed", "failed"),
    None: ("none", "not judged"),
}
"""Style and words of a gate's badge, for each value of the gate's `passed`."""


def sameness_section(facts: Facts) -> Section:
    """Show the results of the verification at export and of a later verification."""
    blocks: list[Block] = []
    again = f"Verified again: {facts.verify_file}"
    for name, verification, title, missing in (
        ("export", facts.exported, "Verified at export", "Verification at export"),
        ("again", facts.repeated, again, "A later verification"),
    ):
        if isinstance(verification, Missing):
            blocks.append(gap(missing, verification, facts.name))
        else:
            blocks += [Heading(title), *_verification(name, verification)]
    return Section(
        "same",
        "Is it the same model",
        "The bundle and the reference ran the same chains of segments, with the memory going on from one segment to "
        "the next, and every value was compared.",
        blocks,
    )


def verdict_of(found: Verification | Missing) -> Badge:
    """Return the verdict as a badge of a few words."""
    if isinstance(found, Missing):
        return Badge("none", "Not verified")
    if not found.passed:
        return Badge("failed", "Verification failed")
    return Badge("passed", "Verified: the same model")


def verdict_by(found: Verification | Missing) -> str:
    """Name the backend, the reference, and the numbers of gates passed, failed and not judged."""
    if isinstance(found, Missing):
        return found.reason
    counts = Counter(gate.passed for gate in found.gates)
    gates = f"{counts[True]} gates passed, {counts[False]} failed, {counts[None]} not judged"
    return f"{found.backend} in {found.precision}, against {found.reference}: {gates}."


def _verification(name: str, verification: Verification) -> list[Block]:
    spread = verification.spread
    blocks: list[Block] = [
        Pairs(
            [
                ("Result", verdict_of(verification)),
                ("Ran on", f"{verification.backend}, {verification.precision}"),
                ("Compared with", verification.reference),
                *([("The chains read", spread.ran_on)] if spread and spread.ran_on else []),
            ]
        ),
        table(
            "Gates: what was judged, what was reached, and the largest value that passes",
            ("Gate", "Verdict", "Reached", "Limit"),
            (2, 3),
            [(g.name, Badge(*STATES[g.passed]), _reached(g), number(g.limit)) for g in some(verification.gates)],
        ),
    ]
    if verification.chains:
        blocks += [_chains(some(verification.chains)), *drift(name, verification)]
    if spread is not None and verification.passed:
        blocks.append(Paragraph(_in_short(spread, verification.text), quiet=True))
    elif spread is not None:
        blocks.append(Heading("How errors are spread"))
        blocks += [_by_decades(*each) for each in islice(_spread(spread, verification.text), MOST_SPREAD)]
        if spread.ranks is not None:
            blocks.append(_ranks(spread.ranks))
    if (kl := verification.kl) is not None:
        cells = [("mean", kl.mean), ("99.9 % of positions are below", kl.late), ("largest", kl.most)]
        rows = [(what, number(value)) for what, value in cells]
        blocks.append(table("KL divergence from the reference, nats", ("Over all positions", "KL"), (1,), rows))
    if verification.text is not None:
        blocks.append(_text(verification.text))
    if verification.sensitivity:
        worst = sorted(verification.sensitivity.items(), key=lambda item: -as_size(item[1]))
        blocks.append(_sensitivity(name, some(worst)))
    return blocks


def _reached(gate: Gate) -> str:
    """Write the value that a gate judged; a missing value in a failed gate stands for infinity or NaN."""
    return "∞ or no number" if gate.value is None and gate.passed is False else number(gate.value)


def _largest(chain: Chain) -> str:
    """Write the largest error of a chain: in nats if it has log-probabilities, else relative."""
    unit = "nats" if any(tensor.unit == "nats" for tensor in chain.tensors) else "relative"
    values = [tensor.largest for tensor in chain.tensors if tensor.unit == unit]
    if any(value is None for value in values):
        return "∞ or no number"
    return number(max((value for value in values if value is not None), default=None))


def _chains(chains: Sequence[Chain]) -> Block:
    rows = [
        (
            chain.name,
            whole(chain.streams),
            whole(chain.segments),
            whole(chain.positions),
            f"{whole(chain.agreeing)} of {whole(chain.decided)}" if chain.decided else number(None),
            _largest(chain),
        )
        for chain in chains
    ]
    names = ("Chain", "Sequences", "Segments", "Positions", "Same best token", "Largest |Δ|")
    return table("Chains: which segments ran, and how far apart the two sides were", names, (1, 2, 3, 4, 5), rows)


def _spread(spread: Spread, text: Text | None) -> Iterator[tuple[str, Unit, Edges, Counts]]:
    """Yield histograms of errors as (name, unit, edges of bins, counts): one per compared tensor, one of the KL
    divergence, and one of the text's tokens.
    """
    for name, errors in spread.errors.items():
        yield name, errors.unit, spread.edges, errors.counts
    if spread.kl is not None:
        yield "KL divergence", "nats", spread.kl_edges, spread.kl
    if text is not None and text.errors:
        yield "tokens of the text", "nats", spread.edges, text.errors


def _in_short(spread: Spread, text: Text | None) -> str:
    """Summarise a passed verification in one line: the largest errors, and how often the best token is the same."""
    largest = [
        f"{what} {_powers(_labels(edges)[max(index for index, count in enumerate(counts) if count)])} {unit}"
        for what, unit, edges, counts in islice(_spread(spread, text), MOST_SPREAD)
        if any(counts)
    ]
    sentence = f"The largest errors: {', '.join(largest) or 'none'}."
    if (ranks := spread.ranks) is not None and "1" in ranks.within:
        sentence += f" The best token is the same at {share(ranks.within['1'] / ranks.positions)} of positions."
    return sentence


def _labels(edges: Edges) -> list[str]:
    """Return a label for each bin: "< 1e-9", "1e-9 … 1e-8", …, "≥ 1"."""
    shown = [f"{edge:.0e}".replace("e-0", "e-").replace("1e+00", "1") for edge in edges]
    between = [f"{first} … {last}" for first, last in pairwise(shown)]
    return [f"< {shown[0]}", *between, f"≥ {shown[-1]}"] if shown else ["all"]


def _by_decades(what: str, unit: Unit, edges: Edges, counts: Counts) -> Block:
    total = sum(counts)
    rows = [
        (_powers(label), whole(count), share(count / total))
        for label, count in zip(_labels(edges), counts, strict=True)
        if count
    ]
    return table(f"Errors of {what} by decades, {unit}", ("Size", "How many", "Share"), (1, 2), rows)


def _powers(label: str) -> str:
    """Replace numbers such as 1e-9 with 10⁻⁹."""
    return re.sub(r"1e([+-]?\d{1,3})", lambda found: power_of_ten(int(found[1])), label)


def _ranks(ranks: Ranks) -> Block:
    within = sorted((int(most), count / ranks.positions) for most, count in ranks.within.items())
    rows = [(f"the first {most}" if most > 1 else "the first", share(part)) for most, part in within]
    overlap = ranks.shared / (ranks.positions * ranks.best)
    rows.append((f"the {ranks.best} best of both sides have in common, on average", share(overlap)))
    caption = f"The reference's best token is among the bundle's best, {whole(ranks.positions)} positions"
    return table(caption, ("Among", "Share of positions"), (1,), rows)


def _text(text: Text) -> Pairs:
    def perplexity(nll: float | None) -> str:
        return number(None if nll is None else math.exp(min(nll, 700.0)), 5)

    place = f" behind the {whole(text.behind)} that int4 is fitted to" if text.behind else ""
    return Pairs(
        [
            (
                "Text",
                f"its first {counted(text.tokens, 'token')}{place}, predicted from an empty memory on. “What memory "
                "does” counts only tokens that a full memory predicts, and txl-deploy score all of the text, so their "
                "perplexities differ from this one",
            ),
            ("Loss of the bundle", f"{fixed(text.runtime_nll, 7)} nats, perplexity {perplexity(text.runtime_nll)}"),
            ("Loss of the reference", f"{fixed(text.reference_nll, 7)} nats"),
            ("Perplexity differs by", share(text.relative)),
        ]
    )


def _sensitivity(name: str, shares: Sequence[tuple[str, float | None]]) -> Figure:
    bars = [Bar(layer, kl if kl is not None else 0.0, number(kl)) for layer, kl in shares]
    seen = f"{shares[0][0]} suffers most: {number(shares[0][1])} nats."
    return Figure(
        "What quantising each layer alone costs",
        named_bars(f"{name}-sensitivity", "KL divergence that each layer causes alone", seen, bars),
        table("KL divergence by layer", ("Layer", "KL mean, nats"), (1,), [(n, number(kl)) for n, kl in shares]),
    )
