"""Help that can be read in a narrow terminal, and shells that complete what is typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import typer
from ptys import COMMAND, in_a_terminal

from txl_deploy import helping
from txl_deploy.verbs import VERBS, app, command

SCRIPTS = sysconfig.get_path("scripts")
SEEN = "Turn a trained Transformer-XL"
"""The beginning of `txl-deploy export -h`, which nothing else that is typed here has."""
ZSH = r"""
zmodload zsh/zpty
zpty typed zsh -f -i
zpty -w typed 'autoload -U compinit; compinit -u -D; eval "$(_TXL_DEPLOY_COMPLETE=source_zsh txl-deploy)"'
zpty -n -w typed $'txl-deploy ex\t-h\nexit\n'
while zpty -r typed line; do print -rn -- $line; done
"""
FISH = """
_TXL_DEPLOY_COMPLETE=source_fish txl-deploy | source
complete -C "txl-deploy ex"
complete -C "txl-deploy export --memory-l"
complete -C "txl-deploy export --precision bf"
"""


def typing_in(shell: str) -> dict[str, str]:
    """The surroundings of a shell in which `txl-deploy` is this one."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb"}


def options_of(verb: str) -> list[str]:
    context = command(verb).make_context(verb, [], resilient_parsing=True)
    options = [each for each in context.command.get_params(context) if each.param_type_name == "option"]
    return [name for each in options for name in (*each.opts, *each.secondary_opts)]


def help_of(made: Any, name: str, columns: int) -> str:
    shown: str = made.make_context(name, [], resilient_parsing=True, terminal_width=columns).get_help()
    return re.sub(r"\x1b\[\d*m", "", shown)


@pytest.mark.parametrize("columns", [80, 60, 40])
@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_whole_on_the_screen_however_narrow_it_is(verb: str, columns: int) -> None:
    shown = help_of(command(verb), verb, columns)
    assert max(map(len, shown.splitlines())) <= columns
    names = options_of(verb)
    assert "--help" in names
    for name in names:
        assert re.search(rf"^  ([^ ].*)?(?<![\w-]){name}(?![\w…-])", shown, re.MULTILINE), name


def test_help_in_a_terminal_is_as_wide_as_the_terminal() -> None:
    left = in_a_terminal([*COMMAND, "export", "-h"], columns=60)
    assert left.code == 0
    assert "  --segment-length" in {line[:18] for line in left.lines}
    assert max(map(len, left.lines)) <= 60
    assert "\x1b[1m" in left.output


@pytest.mark.parametrize("surroundings", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_help_is_plain_where_no_colour_is_wanted(surroundings: dict[str, str]) -> None:
    assert "\x1b" not in in_a_terminal([*COMMAND, "export", "-h"], **surroundings).output


@pytest.mark.parametrize("verb", helping.GROUPS)
def test_groups_name_options_that_are_there_and_each_once(verb: str) -> None:
    named = [f"--{name}" for names in helping.GROUPS[verb].values() for name in names.split()]
    assert len(named) == len(set(named))
    assert set(named) <= set(options_of(verb))
    shown = help_of(command(verb), verb, 80)
    assert [title for title in helping.GROUPS[verb] if f"\n{title}:\n" not in shown] == []


def test_what_an_option_may_be_is_said_and_what_it_is_without() -> None:
    shown = " ".join(help_of(command("export"), "export", 80).split())
    assert "(default fp32; of an ONNX file in fp16 that) <fp32 | fp16 | bf16 | int8 | int4>" in shown
    assert "--same-length / --no-same-length" in shown


@pytest.mark.parametrize("columns", [80, 60])
def test_the_list_of_verbs_says_what_each_does_whole(columns: int) -> None:
    shown = " ".join(help_of(typer.main.get_command(app), "txl-deploy", columns).split())
    for verb, said in VERBS.items():
        assert f" {verb} {said}" in shown


@pytest.mark.parametrize("asked", ["export -h", "help export", "help"])
def test_help_is_given_however_it_is_asked_for(asked: str) -> None:
    done = subprocess.run([*COMMAND, *asked.split()], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"Usage: txl-deploy {'export ' if 'export' in asked else ''}[OPTIONS]")


def test_bash_completes_a_verb(tmp_path: Path) -> None:
    surroundings = typing_in("bash") | {"PS1": "ready> "}
    typed = b'eval "$(_TXL_DEPLOY_COMPLETE=source_bash txl-deploy)"\ntxl-deploy ex\t-h\nexit\n'
    left = in_a_terminal(["bash", "--norc", "-i"], at="ready> ", press=typed, folder=tmp_path, **surroundings)
    assert "ready> txl-deploy export -h" in left.lines
    assert SEEN in left.output


def test_zsh_completes_a_verb(tmp_path: Path) -> None:
    surroundings = os.environ | typing_in("zsh") | {"HOME": str(tmp_path)}
    done = subprocess.run(["zsh", "-f", "-c", ZSH], env=surroundings, capture_output=True, timeout=150, check=True)
    assert SEEN in done.stdout.decode()


def test_fish_completes_verbs_options_and_values(tmp_path: Path) -> None:
    surroundings = os.environ | typing_in("fish") | {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", FISH], env=surroundings, capture_output=True, text=True, timeout=150, check=True
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["export", "--memory-length", "bf16"]
    assert done.stdout.startswith(f"export\t{VERBS['export'][:60]}")


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [("source_fish", 0, "complete --command txl-deploy"), ("source_csh", 1, "Shell csh not supported.")],
)
def test_asking_for_completion_is_no_defect(asked: str, code: int, said: str) -> None:
    surroundings = os.environ | {"_TXL_DEPLOY_COMPLETE": asked}
    done = subprocess.run(COMMAND, env=surroundings, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert (done.stdout + done.stderr).startswith(said)


def test_what_teaches_the_shell_at_hand_is_shown() -> None:
    line = ["bash", "-c", '"$@"; exit $?', "bash", *COMMAND, "--show-completion"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "complete -o default -F _txl_deploy_completion txl-deploy" in done.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inspect --verson", r"No such option: --verson.*; see txl-deploy inspect --help"),
        ("export m.pt --precision fp8", r"Invalid value for '--precision': 'fp8' is .*; see txl-deploy export --help"),
        ("exprt", r"No such command 'exprt'\. Did you mean 'export'.*\? See txl-deploy --help"),
    ],
)
def test_wrong_use_points_to_the_help_of_its_verb(line: str, said: str) -> None:
    done = subprocess.run([*COMMAND, *line.split()], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert re.fullmatch(f"error: {said}\n", done.stderr), done.stderr
