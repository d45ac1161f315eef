"""What messages quote: one line, short, and printable whatever a file holds."""

from __future__ import annotations

from txl_runtime.errors import UsageError, brief, one_line, printable, some


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
    said = one_line(ValueError("the cause " + "x" * 4000 + " the place"))
    assert said.startswith("the cause xxx")
    assert said.endswith("xxx the place")
    assert len(said) < 410
