"""Write a package in plain C, compile it, compare it with its bundle, and only then put it into place.

DIR/txl-package.json, README.md, Makefile, CMakeLists.txt
DIR/NAME.h, NAME.c                   the model: state, init, step, reset
DIR/NAME.weights                     the weights, little-endian, if they are to have a file of their own
DIR/test_NAME.c                      replays stored steps
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import txl_runtime
from txl_export.bundle.placing import check_destination, publishing
from txl_report.numbers import prefixed
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model

from txl_deploy.packages import REPOSITORY, model_name, seal
from txl_deploy.places import refuse_inside
from txl_deploy.plain_c.compiling import code_bytes, compile_replay, find_compiler
from txl_deploy.plain_c.generating import generate
from txl_deploy.plain_c.native import packed_step
from txl_deploy.plain_c.rendering import ALIGNED, context_of, identifier, native_context_of, render
from txl_deploy.plain_c.step import PlainStep, plain_step
from txl_deploy.plain_c.vectors import stored_steps
from txl_deploy.plain_c.verifying import Replay, verify

TARGET = "c"


@dataclass(frozen=True)
class PlainPackage:
    """Facts about a package that was written.

    Attributes:
        folder: the package's folder.
        name: the model's name in C.
        batch_size, segment_length: B and L of a step.
        verified: the result of the comparison with the bundle; "" if there was none.
        state_bytes, weight_bytes: bytes of one state, and of all weights.
        start_bytes: bytes of the constants that states begin with; 0 if these are zeros or are among the weights.
        stack_bytes, code_bytes: bytes of stack that a step takes, and of machine code; None if not measured.
        multiply_adds: number of multiply-adds of a step; None if it is unknown.
        blocks: number of multiply-adds for each L of the package, the longest L first.
        latency: number of positions by which outputs are later than inputs, if inputs come one by one.
    """

    folder: Path
    name: str
    batch_size: int
    segment_length: int
    verified: str
    state_bytes: int
    weight_bytes: int
    start_bytes: int
    stack_bytes: int | None
    code_bytes: int | None
    multiply_adds: int | None
    blocks: dict[int, int | None]
    latency: int


def package_c(
    bundle: Path,
    out: Path,
    force: bool = False,
    name: str | None = None,
    lengths: Sequence[int] = (),
    batch_size: int | None = None,
    weights_file: bool = False,
    max_bytes: int | None = None,
    unverified: bool = False,
    *,
    listener: Listener | None = None,
) -> PlainPackage:
    """Write a package in plain C.

    Args:
        bundle: the bundle's folder.
        out: the folder to write; it must not exist without `force`.
        force: True to replace a package that was written before.
        name: the model's name in C; None for the bundle's name.
        lengths: L of a step, () for the bundle's longest; or several lengths with 1 among them, into which `NAME_feed`
            cuts blocks of any size.
        batch_size: B of a step, if the bundle leaves it open.
        weights_file: True to write the weights into a file of their own.
        max_bytes: maximum number of bytes of weights, start, state, stack and code together.
        unverified: True to skip compiling and comparing.

    Raises:
        UsageError: the folder cannot be written, or the model does not fit plain C.
        BundleError: the bundle cannot be read.
        BackendError: the generator or the compiler refuses the model, or there is no compiler.
        CheckError: the compiled program does not compute the same as the bundle.
    """
    called = identifier(model_name(bundle) if name is None else name)
    if name is not None and called != name:
        raise UsageError(f"--name is {name!r}, expected a name that C and C++ leave free; {called} would do")
    check_destination(out, force, REPOSITORY)
    refuse_inside(out, bundle)
    compiler, listener = None if unverified else find_compiler(), listener or Silent()
    listener.stage("write the step as C")
    model = txl_runtime.load(bundle, backend="cpu", threads=1)
    step = plain_step(model.bundle, lengths, batch_size)
    packed = packed_step(model.bundle, step)
    if packed is None:
        shorter = [generate(model.bundle, one, f"{called}_{one.program.segment_length}") for one in step.shorter]
        context = context_of(step, [generate(model.bundle, step, called), *shorter], called, weights_file)
    else:
        context = native_context_of(step, packed, called, weights_file)
    source = "source.c" if packed is None else "native.c"
    context |= {"verified": "", "measured": None}
    _check_size(context, max_bytes)
    with publishing(out, force, REPOSITORY) as folder:
        _write(folder, f"{called}.c", source, context)
        if weights_file:
            _write_weights(folder / f"{called}.weights", context["weights"])
        if compiler is not None:
            _write(folder, f"{called}.h", "header.h", context)
            context |= _verified(model, step, folder, compiler, context, listener)
            _check_size(context, max_bytes)
        context["vectors"] = stored_steps(model, step, context)
        for file, template in (
            (f"{called}.h", "header.h"),
            (f"test_{called}.c", "test.c"),
            ("Makefile", "Makefile"),
            ("CMakeLists.txt", "CMakeLists.txt"),
            ("README.md", "README.md"),
        ):
            _write(folder, file, template, context)
        seal(folder, TARGET, [called], step.manifest)
    measured = context["measured"] or {}
    sizes = (
        context["state_bytes"],
        context["weight_bytes"],
        context["start_bytes"],
        measured.get("stack"),
        measured.get("code"),
    )
    numbers = (context["batch_size"], context["length"], context["verified"], *sizes)
    blocks = {each["length"]: each["multiply_adds"] for each in context["programs"]}
    return PlainPackage(out, called, *numbers, context["multiply_adds"], blocks, context["latency"])


def _verified(
    model: Model, step: PlainStep, folder: Path, compiler: list[str], context: dict[str, Any], listener: Listener
) -> dict[str, Any]:
    """Compile a package's source and compare it with the bundle; return the result for the templates."""
    name = context["name"]
    with tempfile.TemporaryDirectory() as place:
        replay = _write(Path(place), "replay.c", "replay.c", context)
        listener.stage("compile it")
        compiled, program = compile_replay(compiler, folder, name, replay, context["flags"])
        listener.stage("compare it with the bundle")
        with Replay([str(program), str((folder / f"{name}.weights").absolute())], context) as running:
            verified = verify(model, step, running)
        measured = {
            "stack": verified.stack,
            "code": code_bytes(compiled),
            "flags": context["flags"],
            "compiler": compiler[0],
        }
    return {"verified": f"compared with the bundle over {verified.said}", "measured": measured}


def _write(folder: Path, file: str, template: str, context: dict[str, Any]) -> Path:
    (folder / file).write_text(render(template, context), encoding="utf-8")
    return folder / file


def _write_weights(path: Path, weights: list[dict[str, Any]]) -> None:
    """Write all weights, each at a multiple of `ALIGNED` bytes."""
    with path.open("wb") as file:
        for each in weights:
            data = each["array"].astype(each["array"].dtype.newbyteorder("<")).tobytes()
            file.write(data + bytes(-len(data) % ALIGNED))


def _check_size(context: dict[str, Any], most: int | None) -> None:
    """Raise UsageError if the sizes that are known so far add up to more than `most` bytes."""
    measured = context["measured"] or {}
    parts = {"weights": context["weight_bytes"]}
    parts |= {"start": context["start_bytes"]} if context["start_bytes"] else {}
    parts |= {"state": context["state_bytes"]}
    parts |= {part: measured[part] for part in ("stack", "code") if measured.get(part) is not None}
    total = sum(parts.values())
    if most is not None and total > most:
        listed = ", ".join(f"{part} {prefixed(size)}" for part, size in parts.items())
        raise UsageError(
            f"the package takes {total} bytes ({listed}), --max-bytes allows {most}; package a smaller model, a "
            "shorter --segment-length or fewer sequences"
        )
