"""Build the whole page from facts and measurements, section by section."""

from __future__ import annotations

from dataclasses import dataclass

from txl_report.blocks import KeyFigure, Page, Section
from txl_report.facts.gathering import Facts
from txl_report.facts.model import Context, family_of, memory_rows, size_of_files
from txl_report.facts.plain import Missing
from txl_report.measuring.results import ContextMeasure, DatastoreMeasures, TextMeasures
from txl_report.numbers import counted, number, quantity, size
from txl_report.rendering import render
from txl_report.schema.measurement import Measurement
from txl_report.sections.context_length import context_section, length_of
from txl_report.sections.datastore import datastore_section
from txl_report.sections.making import files_section, versions_section
from txl_report.sections.memory import bits_of, memory_section, opening_of
from txl_report.sections.model import model_section
from txl_report.sections.sameness import sameness_section, verdict_by, verdict_of
from txl_report.sections.speed import engines_section, rate, speed_section, title_of


@dataclass(frozen=True)
class Measures:
    """The measurements for a page; a measurement that was not made is None.

    Attributes:
        source: the name of the text.
        text, context: see `txl_report.measuring`; `Missing` if the measurement was tried but is impossible.
        datastore: losses with and without a datastore; the page has this section only if they were measured.
    """

    source: str = ""
    text: TextMeasures | Missing | None = None
    context: ContextMeasure | Missing | None = None
    datastore: DatastoreMeasures | None = None


def page_of(facts: Facts, measures: Measures | None = None, when: str = "") -> str:
    """Return the page as one HTML document, which loads nothing from the network and has no scripts.

    Args:
        when: the time to note on the page. Without it the same facts and measures give the same bytes.

    Raises:
        BackendError: jinja2 is missing.
    """
    return render(page_values(facts, measures, when))


def page_values(facts: Facts, measures: Measures | None = None, when: str = "") -> Page:
    """Return the page as values, for rendering it and for callers that list its missing parts."""
    measured = measures or Measures()
    # The first screen shows a later verification if there is one: it was made on this machine, and is newer.
    proof = facts.exported if isinstance(facts.repeated, Missing) else facts.repeated
    manifest = facts.manifest
    return Page(
        title=facts.name,
        kind=f"{family_of(manifest)}, {quantity(manifest.parameters)} parameters, {manifest.precision}",
        verdict=verdict_of(proof),
        verdict_by=verdict_by(proof),
        figures=_figures(facts, measured),
        sections=_sections(facts, measured),
        made=f"Made by txl-deploy {_version()}{f', {when}' if when else ''}. This file loads and runs nothing.",
        opening=opening_of(measured.text),
    )


def _sections(facts: Facts, measured: Measures) -> list[Section]:
    name = facts.name
    reads_text, reads_tokens = facts.manifest.vocabulary is not None, facts.manifest.vocab_size > 0
    option = "--text FILE" if reads_text else "--tokens FILE.npy" if reads_tokens else None
    return [
        model_section(facts),
        sameness_section(facts),
        memory_section(name, measured.text, measured.source, option),
        context_section(name, facts.context, measured.context, option),
        *(() if measured.datastore is None else (datastore_section(measured.datastore),)),
        speed_section(name, facts.speed, facts.bench_file),
        engines_section(name, facts.engines),
        files_section(facts),
        versions_section(facts),
    ]


def _figures(facts: Facts, measured: Measures) -> list[KeyFigure]:
    manifest = facts.manifest
    parameters = f"{quantity(manifest.parameters)} parameters in {manifest.precision}, without this page"
    return [
        KeyFigure("Size", size(size_of_files(manifest)), parameters),
        _looks_back(facts, measured.context),
        _loss(facts, measured.text),
        _speed(facts.speed),
    ]


def _looks_back(facts: Facts, measured: ContextMeasure | Missing | None) -> KeyFigure:
    context = facts.context
    allowed = counted(context.tokens, "token") if isinstance(context, Context) else "no known end"
    if not isinstance(measured, ContextMeasure):
        return KeyFigure("Looks back", allowed, "what the architecture allows; its use was not measured")
    of = f"of {allowed} possible" if isinstance(context, Context) else "tokens"
    return KeyFigure("Looks back", length_of(measured, measured.length), of)


def _loss(facts: Facts, losses: TextMeasures | Missing | None) -> KeyFigure:
    if isinstance(losses, TextMeasures):
        loss, perplexity = losses.loss, number(losses.loss.perplexity, 4)
        error = "" if loss.error is None else f" ± {number(loss.perplexity * loss.error, 2)}"
        below = f"on {counted(loss.count, 'token')} of the text{', ± one standard error' if error else ''}"
        if losses.of_bytes:
            return KeyFigure("Bits per byte", bits_of(loss), f"perplexity {perplexity}, {below}")
        return KeyFigure("Perplexity", perplexity + error, below)
    rows = memory_rows(facts.manifest)
    if rows is not None:
        return KeyFigure("Memory", counted(rows, "row"), f"per layer, {size(facts.manifest.state_bytes)} per sequence")
    return KeyFigure("State", size(facts.manifest.state_bytes), "carried from step to step, per sequence")


def _speed(measured: Measurement | Missing) -> KeyFigure:
    if isinstance(measured, Missing):
        return KeyFigure("Speed", "not measured", "the end of the page has the command")
    ours = measured.works[0][0]
    return KeyFigure("Speed", f"{rate(ours)} {ours.unit}/s", f"{title_of(ours)}, {number(ours.ms.p50)} ms")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("txl-deploy")
    except PackageNotFoundError:
        return "(no version)"
