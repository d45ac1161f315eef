"""The page: of every kind of bundle, of any text; nothing in it leaves the page, runs, or is not as it should be."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_pages
from hostile import HOSTILE
from msgspec import structs
from report_pages import Page, measures, replaced
from resealing import BASES, copied, reseal, without_engines
from step_models import counting, recurrent
from txl_export.families.registry import facts_of_bundle
from txl_report import page_of
from txl_report.facts.gathering import Facts, gather
from txl_report.facts.plain import Missing
from txl_report.measuring.results import Loss, MemoryLoss
from txl_report.page import Measures, page_values
from txl_report.schema.verification import Verification
from txl_report.sections.model import model_section
from txl_report.visible import MOST
from txl_runtime.bundle.reading import open_bundle

SECTIONS = ["model", "same", "memory", "context", "speed", "engines", "files", "versions"]
TAGS = """
html head meta title style body a header p h1 h2 h3 div dl dt dd span nav ol ul li main section footer details
summary figure figcaption table caption thead tbody tr th td pre code bdi br strong img svg desc g line text rect
circle polyline polygon image
"""


def facts_of(path: Path) -> Facts:
    bundle = open_bundle(path)
    return gather(bundle, facts_of_bundle(bundle.manifest))


IN_MEMORY = open_bundle(BASES / "transformer_xl").manifest.provenance | {
    "command": {"arguments": [], "in_memory": ["source", "config"]}
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified bundle of a model that was given in memory."""
    path = without_engines(tmp_path_factory.mktemp("bundle") / "small.txl")
    return reseal(path, provenance=IN_MEMORY)


@pytest.fixture(scope="module")
def verified(bundle: Path) -> Facts:
    return facts_of(bundle)


@pytest.fixture(scope="module")
def plainest(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """A step without anything that a Transformer-XL has, written by hand and never verified."""
    path = tmp_path_factory.mktemp("step") / "step.txl"
    recurrent().write(path)
    return facts_of(path)


def held(page: str) -> Page:
    """A page that asks for nothing and runs nothing, and whose parts can be told by everyone."""
    read = Page(page)
    assert {tag for tag, _ in read.found} <= set(TAGS.split())
    for tag, attributes in read.found:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "srcset", "action")], tag
        for name in ("href", "src", "xlink:href"):
            if name in attributes:
                assert re.match(r"#[\w-]+\Z", attributes[name]), attributes[name][:80]
    style = read.alone["html head style"]
    assert "url(" not in style
    assert "@import" not in style
    ids = [attributes["id"] for _, attributes in read.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in read.found:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(attributes.get(name, "").split()) <= set(ids)
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids
    levels = [int(tag[1]) for tag, _ in read.found if re.match(r"h\d\Z", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert read.all("html") == [{"lang": "en"}]
    assert len(read.all("main")) == len(read.all("header")) == len(read.all("nav")) == 1
    tables, figures = read.all("table"), read.all("figure")
    assert len(tables) == len(read.all("caption"))
    assert all(attributes.get("scope") in ("col", "row") for attributes in read.all("th"))
    assert len(figures) == len([each for each in read.all("svg") if each.get("role") == "img"])
    return read


def test_the_page_of_a_verified_bundle_says_so(verified: Facts):
    read = held(page_of(verified))
    assert "Verified: the same model" in read.text
    assert "against the checkpoint, computed in float64" in read.text
    assert f"{verified.manifest.parameters:,}" in read.text
    absent = {"memory", "speed", "engines"}
    assert [each["id"] for each in read.all("section")] == [
        *(name for name in SECTIONS if name not in absent),
        "missing",
    ]
    for file in verified.manifest.files.values():
        assert file.sha256 in read.text


def test_what_is_not_there_is_told_with_the_command_that_adds_it(verified: Facts):
    page = page_values(verified)
    absent = {section.name: section.gaps for section in page.sections if not section.present}
    assert set(absent) == {"memory", "speed", "engines"}
    read = held(page_of(verified))
    listed = read.text.rpartition("What is not here")[2]
    for commands in (
        "txl-deploy report small.txl --text FILE",
        "txl-deploy report small.txl --text FILE --context",
        "txl-deploy bench small.txl --json > bench.json",
        "txl-deploy build small.txl --target rtx",
    ):
        assert commands in listed
    assert all(gap.why in listed for gap in page.gaps)


@pytest.mark.parametrize("name", ["-rf", "--force", "a b; rm -rf ~", "$(id)"])
def test_every_command_of_a_page_has_the_bundle_s_name_as_one_word(verified: Facts, tmp_path: Path, name: str):
    path = copied(BASES / "transformer_xl", tmp_path / name)
    (path / "report.json").write_bytes(b"{}")  # whose reason has a command as well
    damaged = gather(open_bundle(reseal(path, provenance=IN_MEMORY)))
    missing = [dataclasses.replace(verified, name=name), damaged]
    commands = [
        shlex.split(command)
        for facts in missing
        for section in page_values(facts).sections
        for gap in section.gaps
        for command in gap.commands
    ]
    assert len(commands) >= 10
    for words in commands:
        assert (f"./{name}" if name.startswith("-") else name) in words
        assert words.count("--force") == 0


def test_a_bundle_that_nobody_verified_is_not_called_verified(plainest: Facts):
    read = held(page_of(plainest))
    assert "Not verified" in read.text
    assert "the same model" not in read.text.lower().replace("is it the same model", "")
    assert "reads no token ids" in read.text


def test_a_step_that_reads_tokens_has_a_page(tmp_path: Path):
    counting().write(tmp_path / "step.txl")
    held(page_of(facts_of(tmp_path / "step.txl")))


def test_a_failed_verification_is_what_a_reader_sees_first(verified: Facts):
    assert isinstance(verified.exported, Verification)
    gates = tuple(structs.replace(gate, value=None, passed=False) for gate in verified.exported.gates)
    failed = structs.replace(verified.exported, passed=False, gates=gates)
    read = held(page_of(dataclasses.replace(verified, repeated=failed, verify_file="again.json")))
    assert "Verified again: again.json" in read.text
    first = read.text.partition("Contents")[0]
    assert "Verification failed" in first
    assert "0 gates passed" in first
    assert "∞ or no number" in read.text


def test_everything_that_was_measured_is_on_the_page(verified: Facts):
    page = page_values(verified, measures())
    assert {section.name for section in page.sections if not section.present} == {"speed", "engines"}
    read = held(page_of(verified, measures()))
    assert "Measured by capping how many memory rows may be filled" in read.text
    assert "perplexity 4.480, on 100 tokens of the text, ± one standard error" in read.text
    assert "Effective contextat least 24 tokens" in read.text.replace("\n", "")


MAKES_A_PAGE = """
import sys
from pathlib import Path

from report_pages import measures
from txl_export.families.registry import facts_of_bundle
from txl_report import page_of
from txl_report.facts.gathering import gather
from txl_runtime.bundle.reading import open_bundle

bundle = open_bundle(Path(sys.argv[1]))
sys.stdout.buffer.write(page_of(gather(bundle, facts_of_bundle(bundle.manifest)), measures()).encode())
"""


def test_the_same_bundle_gives_the_same_bytes_in_every_process(verified: Facts, bundle: Path):
    """Sets have another order in each process: none of them decides what stands where."""
    command = [sys.executable, "-c", MAKES_A_PAGE, str(bundle)]
    pages = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(report_pages.__file__).parent)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert pages[0] == pages[1] == page_of(verified, measures()).encode()


def test_a_page_notes_the_time_that_it_is_given(verified: Facts):
    assert "2026-01-02" in page_of(verified, when="2026-01-02")


@pytest.mark.parametrize("hostile", [*HOSTILE, "\ud800", "\udcff\udce2", "</td></table></main>", "\n" * 50, ""])
def test_no_text_changes_what_a_page_consists_of(verified: Facts, hostile: str):
    """Every text in facts and measurements is a stranger's: the elements are the same as of harmless texts."""

    def elements(text: str) -> list[tuple[str, str]]:
        bytewise = text.replace("\ud800", "?")  # no bytes of a token stand for it
        page = held(page_of(replaced(verified, lambda _: text), replaced(measures(), lambda _: bytewise)))
        inner = ("bdi", "br")
        return [
            (tag, each.get("class", ""))
            for tag, each in page.found
            if tag not in inner and each.get("class") != "symbol"
        ]

    assert elements(hostile) == elements("harmless" if hostile else "")


@pytest.mark.parametrize("hostile", [text for text in HOSTILE if len(text) < 300])
def test_every_text_is_shown_whole(verified: Facts, hostile: str):
    from txl_report.visible import as_one_line

    read = held(page_of(dataclasses.replace(verified, name=hostile)))
    assert as_one_line(hostile) in read.text
    assert as_one_line(hostile) in read.alone["html head title"]
    raw = page_of(dataclasses.replace(verified, name=hostile))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]", raw)
    raw.encode()


def test_every_text_is_cut(verified: Facts):
    """A page shows the beginning of a name of any length; commands alone are whole."""
    page = page_of(replaced(verified, lambda _: "x" * 9_000), replaced(measures(), lambda _: "x" * 9_000))
    assert not re.search(f"x{{{MOST + 1}}}", re.sub("<pre .*?</pre>", "", page, flags=re.DOTALL))
    assert page.count("x" * MOST) > 50
    assert "(9,000 characters)" in page


def test_numbers_that_are_none_are_shown_as_such(verified: Facts):
    measured = measures()
    assert measured.text is not None
    infinite = replaced(measured.text, str)
    loss = dataclasses.replace(infinite.loss, nll=float("inf"), perplexity=float("inf"), error=float("nan"))
    positions = tuple(dataclasses.replace(each, loss=loss) for each in infinite.by_position)
    text = dataclasses.replace(infinite, loss=loss, by_position=positions)
    assert "∞" in held(page_of(verified, dataclasses.replace(measured, text=text))).text
    assert isinstance(verified.exported, Verification)
    assert verified.exported.text is None
    assert np.isfinite(len(page_of(dataclasses.replace(verified, exported=Missing("Nobody did.", "do it")))))


# ---- colours

TEMPLATES = Path(__file__).parents[2] / "export/txl_report/templates"
STYLE = "".join((TEMPLATES / name).read_text() for name in ("base.css", "page.css"))
COLOURS = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", STYLE))
BACKS = ["page", "card", "sunken", *(f"{side}-{n}" for side in ("gain", "loss") for n in (1, 2, 3))]
TEXTS: list[tuple[str, str]] = [
    *(("ink", back) for back in [*BACKS, "good-back", "bad-back", "wait-back"]),
    *((name, back) for name in ("soft", "accent") for back in ("page", "card")),
    *((name, back) for name in ("good", "bad", "wait") for back in ("page", f"{name}-back")),
]


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    first, second = sorted((light(one), light(other)))
    return (second + 0.05) / (first + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_and_lines_can_be_told_from_what_is_behind_them(theme: int):
    def colour(name: str) -> Any:
        return COLOURS[name].split(", ")[theme]

    for text, back in TEXTS:
        assert contrast(colour(text), colour(back)) >= 7, (text, back)
    for line in (f"s{n}" for n in range(1, 7)):
        assert contrast(colour(line), colour("page")) >= 4.5, line


def test_the_first_screen_tells_both_lengths_of_context(verified: Facts):
    """By the paper's rule losses that merely differ count as a gain: of random weights it is far longer."""
    (figure,) = (each for each in page_values(verified, measures()).figures if each.name == "Looks back")
    assert figure.value == "at least 24"
    assert figure.below == "of 5 tokens possible"


def test_the_first_screen_tells_how_sure_the_perplexity_is_and_of_which_tokens(verified: Facts):
    measured = measures()
    assert measured.text is not None
    (figure,) = (each for each in page_values(verified, measured).figures if each.name == "Bits per byte")
    assert figure.value == "2.164 ± 0.014"
    unsure = dataclasses.replace(
        measured.text, of_bytes=False, loss=dataclasses.replace(measured.text.loss, error=None)
    )
    (figure,) = (each for each in page_values(verified, Measures(text=unsure)).figures if each.name == "Perplexity")
    assert (figure.value, figure.below) == ("4.480", "on 100 tokens of the text")


@pytest.mark.parametrize(
    ("mean", "error", "of_bytes", "said"),
    [
        (0.4, 0.1, False, "Memory lowers perplexity from 6.69 to 4.48 on the first 300 of 400 tokens"),
        (0.4, 0.1, True, "Memory lowers bits per byte from 2.74 to 2.16 on the first 300 of 400 tokens"),
        (-0.4, 0.1, False, "Memory raises perplexity from 3.00 to 4.48 on the first 300 of 400 tokens"),
        (
            0.4,
            0.3,
            False,
            "No sure effect of memory on the first 300 of 400 tokens: perplexity 6.69 without, 4.48 with it",
        ),
        (
            0.4,
            None,
            False,
            "No sure effect of memory on the first 300 of 400 tokens: perplexity 6.69 without, 4.48 with it",
        ),
    ],
)
def test_a_page_opens_with_what_memory_did_and_how_sure_that_is(
    verified: Facts, mean: float, error: float | None, of_bytes: bool, said: str
):
    text = measures().text
    assert text is not None
    assert text.gain is not None
    nlls = ((0, 1.5 + mean), (8, 1.5))
    lengths = [MemoryLoss(rows, Loss(100, nll, 0.01, math.exp(nll)), 0, 0) for rows, nll in nlls]
    gain = dataclasses.replace(text.gain, mean=mean, error=error)
    found = dataclasses.replace(text, by_memory=tuple(lengths), gain=gain, of_bytes=of_bytes)
    page = page_values(verified, Measures(text=found))
    assert page.opening is not None
    assert page.opening.title == said
    first = held(page_of(verified, Measures(text=found))).text.partition("Contents")[0]
    assert said in first
    assert "position in the segment" in first
    assert [piece.words for piece in page.opening.passage.pieces] == [
        "37 % with memory, 5.0 % without: +2.00 nats",
        "14 % with memory, 37 % without: −1.00 nats",
        "14 % with memory, 14 % without: 0 nats",
    ]
    assert "Of the 100 tokens that count, these 3 in a row gained most: +0.333 nats per token, all of them " in first
    everything = dataclasses.replace(found, used=found.given)
    page = page_values(verified, Measures(text=everything))
    assert page.opening is not None
    assert page.opening.title == said.replace("the first 300 of 400 tokens", "the text")


def test_a_page_without_a_comparison_opens_without_a_picture(verified: Facts):
    text = measures().text
    assert text is not None
    alone = dataclasses.replace(text, passage=None, gain=None, by_memory=None, reason="There is nothing to leave out.")
    page = page_values(verified, Measures(text=alone))
    assert page.opening is None
    (memory,) = (section for section in page.sections if section.name == "memory")
    assert any(block.kind == "figure" for block in memory.blocks)
    assert [gap.what for gap in page.gaps if gap.why == "There is nothing to leave out."] == ["Losses with less memory"]


def test_a_small_number_of_parameters_is_told_once(verified: Facts):
    rows = dict(model_section(verified).blocks[0].rows)
    assert rows["Parameters"] == f"{verified.manifest.parameters:,}"
    large = dataclasses.replace(verified, manifest=structs.replace(verified.manifest, parameters=1_974_784))
    assert dict(model_section(large).blocks[0].rows)["Parameters"] == "2.0 million (1,974,784)"
