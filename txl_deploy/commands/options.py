"""Options that several verbs share."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from txl_runtime.errors import UsageError

from txl_deploy.retrieval import KNN, KNN_TEMPERATURE, KNN_WEIGHT, Mixture

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle that `export` made.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", help="auto, cpu, cuda, tensorrt, rtx or native.")]
Threads = Annotated[
    int | None, typer.Option("--threads", help="How many threads the engine uses. (default one per physical core)")
]
Module = Annotated[
    str | None, typer.Option("--module", help="FILE.py:FUNCTION of the model of your own that it came from.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]


def _share(text: str) -> float | str:
    """Return the value of --knn-weight from its text: a number, or "gate"."""
    return text if text == "gate" else float(text)


MIXING = {
    "datastore": (Path, typer.Option("--datastore", metavar="DIR", help="A store that `datastore build` made.")),
    "knn": (int, typer.Option("--knn", metavar="K", help=f"Neighbours of each prediction. (default {KNN})")),
    "knn_temperature": (
        float,
        typer.Option(
            "--knn-temperature",
            metavar="T",
            help=f"Divisor of their squared distances. (default {KNN_TEMPERATURE:g})",
        ),
    ),
    "knn_weight": (
        Any,
        typer.Option(
            "--knn-weight",
            metavar="W",
            parser=_share,
            help=f"Their share of the probability; gate for what `datastore fit` learnt. (default {KNN_WEIGHT:g})",
        ),
    ),
}
"""The options of a command that searches a datastore: type and option, by name."""


def takes_datastore(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `MIXING` in place of its parameter `mixture`, a `Mixture` or None.

    The command raises UsageError for a number that is out of range, or that is given without a store.
    """
    signature = inspect.signature(run, eval_str=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])
        for name, (kind, option) in MIXING.items()
    ]

    @wraps(run)
    def mixing(**given: Any) -> None:
        folder, *numbers = (given.pop(name) for name in MIXING)
        if folder is None and any(number is not None for number in numbers):
            raise UsageError(
                "--knn, --knn-temperature and --knn-weight are for --datastore; give one, or leave them out"
            )
        run(**given, mixture=None if folder is None else Mixture(folder, *numbers))

    parameters: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        mine = each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += options if each.name == "mixture" else [mine]
    vars(mixing)["__signature__"] = signature.replace(parameters=parameters)
    mixing.__annotations__ = {each.name: each.annotation for each in parameters}
    return mixing


def like_export(name: str) -> Any:
    """Return the flag of the option `name` of `export`, for a different verb that has the same option."""
    from txl_export.options import flags_of_export

    flag = flags_of_export()[name]
    return typer.Option(flag.names, help=flag.help)


def parse_aliases(pairs: list[str] | None) -> dict[str, str]:
    """Parse the pairs of --alias, as `parse_pairs` does: ["a.b=c.d"] becomes {"a.b": "c.d"}."""
    return parse_pairs("--alias", pairs, "theirs=original, dotted names both")


def parse_pairs(flag: str, pairs: list[str] | None, form: str, empty: bool = False) -> dict[str, str]:
    """Parse the pairs of a repeatable option: ["A=B"] becomes {"A": "B"}; with `empty`, "A=" is allowed.

    Raises:
        UsageError: a pair does not have this form, or a name is given twice.
    """
    split = [(pair, *pair.partition("=")) for pair in pairs or []]
    if wrong := [pair for pair, name, sign, target in split if not (name and sign and (target or empty))]:
        raise UsageError(f"{flag} is {wrong[0]!r}, expected {form}; check it")
    if twice := [name for name, count in Counter(name for _, name, *_ in split).items() if count > 1]:
        raise UsageError(f"{flag} is given twice for {twice[0]}, expected one for each name; leave one out")
    return {name: target for _, name, _, target in split}
