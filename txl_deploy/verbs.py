"""The verbs of `txl-deploy`: a table of verbs, and an application that imports only the module of the called verb.

To add a verb, write `txl_deploy/commands/VERB.py` with a function `run` and add one line to `VERBS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from txl_deploy.helping import SETTINGS, Command, Group

VERBS = {
    "inspect": "Show architecture, sizes, context and parity; what a checkpoint holds, or what an ONNX file remembers.",
    "export": "Turn a trained Transformer-XL, or a model of your own that carries state, into a verified bundle.",
    "build": "Build the engines of a bundle, or compile its step, and put them into it.",
    "verify": "Compare a bundle or an ONNX file with PyTorch over chained segments; exit code 1 when a gate fails.",
    "selftest": "Replay stored vectors on this machine; exit code 1 when they differ.",
    "generate": "Continue a prompt; text where the bundle has a vocabulary, token ids otherwise.",
    "score": "Score a text, or the documents of a folder or a file: perplexity, bits per token and, of text, per byte.",
    "datastore": "Build a store of what a model has read, which score, generate and serve search at each prediction.",
    "package": "Write a package: a model repository for Triton, the model as plain C, or a folder for browsers.",
    "serve": "Serve a bundle over HTTP as OpenAI's clients expect it: many sessions, each with its own memory.",
    "playground": "Try a bundle on a page in the browser, on this machine alone: generate, see probabilities, go back.",
    "report": "Make a page that shows what a bundle is and what proves it: one file that loads nothing.",
    "bench": "Measure decoding, prefill and scoring with full memory, competitors in turns; load time and memory.",
}
"""Every verb with its line in `txl-deploy --help`, which is also the first line of the docstring of its `run`."""


class _Verbs(Group):
    """A group that lists every verb from the table, and imports only the verb that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the verb that the first argument names, and the arguments after it."""
        name, resolved, rest = super().resolve_command(ctx, args)
        return name, resolved if name is None else command(name), rest


app = typer.Typer(
    name="txl-deploy",
    help="From a trained model with state to a verified bundle, and streaming from it.",
    cls=_Verbs,
    context_settings=SETTINGS,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def command(verb: str) -> Any:
    """Return a verb's command with its options, which typer makes from the verb's function."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    click_command = alone.command(name=verb, cls=Command, context_settings=SETTINGS)
    click_command(import_module(f"txl_deploy.commands.{verb}").run)
    return typer.main.get_command(alone)


def _listed() -> None:
    """Do nothing: this function stands in place of every verb until the verb is called."""


for _name, _help in VERBS.items():
    app.command(name=_name, help=_help, short_help=_help)(_listed)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("txl-deploy"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
