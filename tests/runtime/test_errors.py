"""Quotations in messages: one line, short, and printable whatever a file holds."""

from __future__ import annotations

from txl_runtime.errors import UsageError, brief, nearest, one_line, printable, some, todo_about


def test_names_beyond_the_first_are_counted():
    assert some([]) == ""
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert some(["a", "b"], 1) == "a and 1 more"


def test_a_long_text_is_cut_and_a_short_one_stays():
    assert brief("x" * 80) == "x" * 80
    assert brief("x" * 81) == "x" * 77 + "..."


def test_what_is_not_printable_is_escaped():
    assert printable("a\nb\x1b[31m\ud800") == "a\\nb\\x1b[31m\\ud800"
    assert str(UsageError("a\nb")) == "a\\nb"


def test_an_error_of_many_lines_becomes_one_and_a_long_one_keeps_its_beginning_and_its_end():
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(ValueError("FAIL : /onnxruntime_src/core/graph.cc:18 it was false.")) == "FAIL : it was false."
    said = one_line(ValueError("the cause " + "x" * 4000 + " the place"))
    assert said.startswith("the cause xxx")
    assert said.endswith("xxx the place")
    assert len(said) < 410


def test_a_misspelt_or_shortened_name_leads_to_the_one_that_is_meant():
    known = ["marks", "observation", "observed"]
    assert nearest("obs", known) == "observation"
    assert nearest("obsrvation", known) == "observation"
    assert nearest("mark", known) == "marks"
    assert nearest("o", known) == nearest("reward", known) == nearest("obs", []) == ""
    assert nearest("mrk", known) == "marks"
    assert todo_about("observation", {"obs", "mask"}) == "did you mean 'obs'?"
    assert todo_about("observation", {"ob", "mask"}) == "take it out"
    assert nearest("mrk", known, alike=0.9) == ""
    assert todo_about("obs", known) == "did you mean 'observation'?"
    assert todo_about("reward", known) == "take it out"
