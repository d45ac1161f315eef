"""Count what a checkout consists of: lines, first words, imports, arrows, circles, questions about the kind of model.

    python benchmarks/compare/house.py [CHECKOUT] [--verbose] [--json]
    python benchmarks/compare/house.py OLD NEW [--verbose] [--json]

The second form prints each count of both checkouts, and the difference. The script imports no package of a checkout: it
reads files as text and as syntax trees.

**Lines**: all lines, and lines of code. A line of code has a token that is no comment and no part of a docstring. Each
statement that is only a string is a docstring here, also below a constant.

**Beside the product**: all lines of what `BESIDE` names: C++, JavaScript, tests, benchmarks, samples, pages of docs.

**Openings**: docstrings of the product's modules, classes and functions whose first word is one of `OPENINGS`, such as
"Whether it fits."; a reader would have to look for the verb in the function's name.

**Imports inside functions**: statements in the body of a function that import from one of the five packages.

A **room** is a folder of a package, or one of its modules if the module lies in no folder.

**Upward arrows**: imports from a package or a room whose level is equal to or above the importing module's. `PACKAGES`
has the levels of packages, `LEVELS` those of the runtime's rooms, as docs/design.md orders them. Imports only for types
and imports inside functions count.

**Circles**: groups of modules, or of rooms of the runtime, that reach one another by imports. Imports only for types
and imports inside functions count.

**Questions about the kind of model** are expressions that tell a Transformer-XL from a different step, or one way of
keeping state (update rule, placement) from a different way. Each expression counts once, in one of these forms:

* rule: a comparison (==, !=, in, not in, is) with an update rule by its name ("ring", "rolled", "replace", "replaced"),
  or with a tuple, list or set that holds such a name; or a pattern of a `match` that is such a name.
* kind: a comparison of a name or attribute that ends in `kind` with "step".
* rows: `"fill" in ….counters` and its negation; `….counters` used as a truth value; an attribute `memory_length`
  compared with None.
* family: a comparison in which a name or attribute `family_name`, or "transformer_xl" or "own_module", takes part.
* class: `isinstance`, `issubclass` or a comparison of `type(…)` with a class whose name says the kind of model, i.e.
  matches `KIND_OF_CLASS` (HostLoop, StepState, LoopState, RingMemory, StepReport, StepWorks, StepSpec, …).
* flag: a name, attribute or call that says the kind (`FLAGS`: `_counts_rows`, `is_transformer_xl(…)`, `transformer_xl`,
  `ring`, `rolled` …), used as a truth value or compared with None.
* lookup: a call with an update rule's name among its arguments (`states_of("rolled")`), used as a truth value.
* table: a literal dict that has at least two update rules or families as keys.

A truth value is the condition of an if, a conditional expression, a while, an assert or a comprehension, or an operand
of `and`, `or` and `not`. Three things do not count: fields of a manifest (`streams`, `lengths`, `commits`, `joint`,
`can`, `open_batch`), since they say a property and not a kind; calls that select by a rule and are no truth value
(`states_of(update)`); tests and benchmarks.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

PACKAGES = {"txl_runtime": 0, "txl_engines": 1, "txl_report": 1, "txl_export": 2, "txl_deploy": 3}
"""The level of each package; a package may import only from packages of lower levels."""
PLACES = ("runtime", "export", "")
"""The folders of a checkout in which a package may lie; "" is the checkout's root."""
LEVELS = {"system": -1, "errors": 0, "types": 0, "listener": 0, "starting": 0, "files": 0, "installing": 0}
LEVELS |= {"update_rules": 1, "ladder": 1, "bundle": 1, "guard": 2, "streaming": 3, "host": 4, "device": 4, "native": 5}
LEVELS |= {"sandbox": 1, "model": 6, "sessions": 7, "selftest": 7}
"""The level of each room of the runtime; the runtime's `__init__.py`, which has the public names, is above all."""
RUNTIME_ROOMS = ("bundle", "guard", "sandbox", "streaming", "host", "native", "device", "sessions")
DEPLOY_ROOMS = ("bench", "serve", "triton", "corpora")

BESIDE = {
    "C++, src and include": ("runtime/cpp/src/**/*.[ch]*", "runtime/cpp/include/**/*.h*"),
    "C++, tests, fuzz and samples": tuple(f"runtime/cpp/{room}/**/*.[ch]*" for room in ("tests", "fuzz", "samples")),
    "JavaScript of pages": ("txl_deploy/**/*.js", "export/txl_report/**/*.js"),
    "HTML and CSS of pages": tuple(
        f"{room}/**/*.{kind}" for room in ("txl_deploy", "export/txl_report") for kind in ("html", "css")
    ),
    "tests, Python": ("tests/**/*.py",),
    "tests, other code": tuple(f"tests/**/*.{kind}" for kind in ("c", "cpp", "hpp", "js")),
    "benchmarks": ("benchmarks/**/*.py",),
    "samples": ("samples/**/*.py",),
    "docs": ("*.md", "docs/**/*.md"),
}
"""Patterns, below a checkout's root, of files besides the product's Python, by kind of file."""
OPENINGS = ("What", "How", "Whether", "Of", "Where")

RULES = {"ring", "rolled", "replace", "replaced"}
FAMILIES = {"transformer_xl", "own_module"}
FLAGS = re.compile(r"_*(is_)?(counts_rows|transformer_xl|own_module|ring|rolled|replaced_state|step_loop)$")
KIND_OF_CLASS = re.compile(
    r"(Ring|Rolled|Replaced|TransformerXL)|^Step[A-Z]\w*|^(Host|OpenHost|Device|DeviceStep)Loop$|^LoopState$|^Memory$"
    r"|^(Rows|Chain)Result$|^(Rows|Step)Report$|^(Token|Step)Works$|Placement$"
)


@dataclass
class House:
    """The counts of a checkout.

    Attributes:
        lines: for each room, the number of lines and the number of lines of code.
        beside: for each kind of `BESIDE`, the number of lines of its files.
        openings: for each word of `OPENINGS`, the places of docstrings that begin with it.
        inner: for each package, the places of imports inside functions.
        upward: for each package or room of the runtime, the imports from its own or a higher level.
        circles: groups of modules or rooms that reach one another by imports.
        questions: for each room, file, line and form of each question about the kind of model.
    """

    lines: dict[str, list[int]] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)
    openings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    inner: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    upward: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    circles: list[list[str]] = field(default_factory=list)
    questions: dict[str, list[tuple[str, str, str]]] = field(default_factory=lambda: defaultdict(list))


# --- counting -----------------------------------------------------------------------------------------------------


def counted(checkout: Path) -> House:
    """Read a checkout and return its counts."""
    house, modules = House(), dict(_modules(checkout))
    if not modules:
        raise SystemExit(f"{checkout} holds none of {', '.join(PACKAGES)}, expected a checkout of this project")
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        text = path.read_text(encoding="utf-8")
        tree, place, room = ast.parse(text), str(path.relative_to(checkout)), room_of(name)
        both = house.lines.setdefault(room, [0, 0])
        both[0] += text.count("\n")
        both[1] += code_lines(text, tree)
        house.questions[room] += [(place, f"{line}", form) for line, form in questions(tree)]
        for line, word in openings(tree):
            house.openings[word].append(f"{place}:{line}")
        results = list(_imports(tree, name, modules, path.name == "__init__.py"))
        arrows[name] = {target for target, *_ in results} - {name}
        inside = sorted({line for _, line, within in results if within})
        house.inner[name.partition(".")[0]] += [f"{place}:{line}" for line in inside]
    house.lines = {room: house.lines[room] for room in sorted(house.lines, key=_order)}
    house.beside = {name: beside(checkout, patterns) for name, patterns in BESIDE.items()}
    _draw(house, arrows)
    return house


def _modules(checkout: Path) -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        folder = next((checkout / place for place in PLACES if (checkout / place / package).is_dir()), None)
        for path in sorted((folder / package).rglob("*.py")) if folder else ():
            parts = path.relative_to(folder).with_suffix("").parts if folder else ()
            yield ".".join(parts).removesuffix(".__init__"), path


def room_of(module: str) -> str:
    """Return the room to which a module's lines are added, e.g. "runtime/bundle" for "txl_runtime.bundle.axes"."""
    package, *rest = module.split(".")
    first = rest[0] if rest else ""
    if package == "txl_runtime":
        return f"runtime/{first if first in RUNTIME_ROOMS else 'root'}"
    if package == "txl_export":
        if {"parity", "proof"} & set(rest):
            return "export/parity"
        if "own_module" in rest:
            return "export/own_module"
        return "export/checkpoints" if first == "checkpoints" else "export/rest"
    if package == "txl_deploy":
        return f"deploy/{first if first in DEPLOY_ROOMS else 'rest'}"
    return package


def _order(room: str) -> tuple[int, int, str]:
    places = ("runtime", "txl_engines", "txl_report", "export", "deploy")
    return places.index(room.partition("/")[0]), room.endswith(("/root", "/rest")), room


def code_lines(text: str, tree: ast.AST) -> int:
    """Return the number of lines that hold more than comments and docstrings."""
    told: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            used |= set(range(token.start[0], token.end[0] + 1))
    return len(used - told)


def beside(checkout: Path, patterns: Sequence[str]) -> int:
    """Return the number of lines of all files that match the patterns, each file once."""
    results = {path for pattern in patterns for path in checkout.glob(pattern) if path.is_file()}
    return sum(path.read_bytes().count(b"\n") for path in results)


def openings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and first word of each docstring that begins with a word of `OPENINGS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").split(maxsplit=1)[:1]
            for word in set(first) & set(OPENINGS):
                yield node.body[0].lineno, word


def _imports(tree: ast.AST, module: str, modules: Mapping[str, Path], package: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield each module of the project that a module imports, the line, and True for an import inside a function."""
    inside = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        named = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = parts[: len(parts) - node.level + package] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            named = [f"{source}.{alias.name}" for alias in node.names]
        for name in named:
            while name not in modules and "." in name:
                name = name.rpartition(".")[0]  # the imported name is defined in that module
            if name in modules:
                yield name, node.lineno, node in inside


def _draw(house: House, arrows: Mapping[str, set[str]]) -> None:
    """Find upward arrows and circles of imports, and add them to the counts.

    Args:
        house: the counts.
        arrows: for each module, the modules of the project that it imports.
    """
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, targets in arrows.items():
        package, mine = module.partition(".")[0], _runtime_room(module)
        for target in sorted(targets):
            other, theirs = target.partition(".")[0], _runtime_room(target)
            if other != package and PACKAGES[other] >= PACKAGES[package]:
                house.upward[package].append(f"{module} → {target}")
            if package == other == "txl_runtime" and mine != theirs:
                rooms[mine].add(theirs)
                if mine in LEVELS and LEVELS.get(theirs, len(LEVELS)) >= LEVELS[mine]:
                    house.upward[f"runtime/{mine}"].append(f"{module} → {target}")
    house.circles = [*circles(arrows), *([f"room {room}" for room in group] for group in circles(rooms))]


def _runtime_room(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return groups of nodes that reach one another along arrows: [["a", "b"]] of {"a": {"b"}, "b": {"a"}}."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        seen, left = set[str](), [start]
        while left:
            for target in arrows.get(left.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    left.append(target)
        reached[start] = seen
    groups = {tuple(sorted(other for other in reached[node] if node in reached.get(other, ()))) for node in arrows}
    return [list(group) for group in sorted(groups) if len(group) > 1]


# --- questions about the kind of model ----------------------------------------------------------------------------


def questions(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and form of every question about the kind of model; the module's docstring defines the forms."""
    results = {}
    truths = set(_truths(tree))
    for node in ast.walk(tree):
        form = None
        if isinstance(node, ast.Compare):
            form = _comparison(node)
        elif isinstance(node, ast.Call) and _name(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            form = "class" if any(KIND_OF_CLASS.search(name) for name in _names(node.args[1])) else None
        elif isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            form = "table" if sum(key in RULES | FAMILIES for key in keys) > 1 else None
        elif isinstance(node, ast.MatchValue):
            form = "rule" if _constants(node.value) & (RULES | FAMILIES) else None
        if form is None and node in truths:
            form = _truth(node)
        if form is not None and isinstance(node, ast.expr | ast.MatchValue):
            results[node.lineno, node.col_offset, form] = node.lineno, form
    return [results[place] for place in sorted(results)]


def _truths(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield expressions that are used as truth values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand


def _comparison(node: ast.Compare) -> str | None:
    """Return a comparison's form of question, e.g. "rows"; None if it does not ask about the kind of model."""
    sides = [node.left, *node.comparators]
    constants, names = set(chain.from_iterable(map(_constants, sides))), {_name(side) for side in sides}
    none = any(isinstance(side, ast.Constant) and side.value is None for side in sides)
    rows = none and any(isinstance(side, ast.Attribute) and side.attr == "memory_length" for side in sides)
    if constants & RULES:
        return "rule"
    if "step" in constants and any(name.endswith("kind") for name in names):
        return "kind"
    if ("fill" in constants and "counters" in names) or rows:
        return "rows"
    if constants & FAMILIES or "family_name" in names:
        return "family"
    if any(isinstance(side, ast.Call) and _name(side.func) == "type" for side in sides):
        return "class" if any(KIND_OF_CLASS.search(name) for name in names) else None
    return "flag" if none and any(FLAGS.match(name) for name in names) else None


def _truth(node: ast.AST) -> str | None:
    """Return a truth value's form of question, e.g. "flag"; None if it does not ask about the kind of model."""
    if _name(node) == "counters" and isinstance(node, ast.Attribute):
        return "rows"
    if FLAGS.match(_name(node.func if isinstance(node, ast.Call) else node)):
        return "flag"
    if isinstance(node, ast.Call) and any(_constants(argument) & RULES for argument in node.args):
        return "lookup"
    return None


def _name(node: ast.AST) -> str:
    """Return the identifier of a name or an attribute, e.g. "b" of `a.b`; "" for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _names(node: ast.AST) -> list[str]:
    return [name for inner in ast.walk(node) if (name := _name(inner))]


def _constants(node: ast.AST) -> set[str]:
    """Return the string of a literal, or all strings of a literal tuple, list or set; an empty set for other nodes."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


# --- tables -------------------------------------------------------------------------------------------------------


def figures(house: House) -> dict[str, int]:
    """Return every count by its name in the table, e.g. {"lines, runtime/bundle": 2000}."""
    results: dict[str, int] = {}
    by_room = {
        "lines": {room: lines for room, (lines, _) in house.lines.items()},
        "code lines": {room: code for room, (_, code) in house.lines.items()},
        "questions": {room: len(house.questions[room]) for room in house.lines},
    }
    for title, counts in by_room.items():
        results |= {f"{title}, {room}": number for room, number in counts.items()}
        results[f"{title}, runtime in all"] = sum(n for room, n in counts.items() if room.startswith("runtime/"))
        results[f"{title}, in all"] = sum(counts.values())
    results |= {f"lines, {name}": number for name, number in house.beside.items()}
    results |= {f"docstrings that begin with {word}": len(house.openings[word]) for word in OPENINGS}
    results["docstrings that begin with one of these"] = sum(map(len, house.openings.values()))
    results["files with questions"] = len({place for asked in house.questions.values() for place, *_ in asked})
    forms = Counter(form for asked in house.questions.values() for *_, form in asked)
    results |= {f"questions of form {form}": forms[form] for form in sorted(forms)}
    results |= {f"imports inside functions, {package}": len(house.inner[package]) for package in PACKAGES}
    results["imports inside functions, in all"] = sum(map(len, house.inner.values()))
    return results | {"upward arrows": sum(map(len, house.upward.values())), "circles": len(house.circles)}


def table(houses: Sequence[House]) -> str:
    """Return a markdown table of one checkout's figures, or of two checkouts' with their difference."""
    sides = [figures(house) for house in houses]
    head = ["", "count"] if len(sides) == 1 else ["", "before", "after", "difference"]
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name in dict.fromkeys(chain(*sides)):
        numbers = [side.get(name, 0) for side in sides]
        cells = [f"{number:,}" for number in numbers]
        cells += [f"{numbers[1] - numbers[0]:+,}"] if len(sides) == 2 else []
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def details(house: House) -> str:
    """Return the places of all questions, openings, imports, upward arrows and circles, as lines of text."""
    lines: list[str] = []
    for asked in house.questions.values():
        places: dict[str, list[str]] = defaultdict(list)
        for place, line, form in asked:
            places[place].append(f"{line} {form}")
        lines += [f"question: {place}: {', '.join(where)}" for place, where in sorted(places.items())]
    lines += [f"opening: {place}: {word}" for word, places in house.openings.items() for place in places]
    lines += [f"import inside a function: {place}" for inner in house.inner.values() for place in inner]
    lines += [f"upward: {arrow}" for arrows in house.upward.values() for arrow in arrows]
    return "\n".join([*lines, *(f"circle: {', '.join(group)}" for group in house.circles)])


def main() -> int:
    """Read the command line, count, and print the table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT", help="one, or OLD and NEW (this one)")
    parser.add_argument("--verbose", action="store_true", help="list where each thing stands, too")
    parser.add_argument("--json", action="store_true", help="all figures, and where each thing stands, as JSON")
    options = parser.parse_args()
    if len(options.checkouts) > 2:
        parser.error(f"{len(options.checkouts)} checkouts are named, expected one, or two to compare")
    checkouts = options.checkouts or [here]
    houses = [counted(checkout.resolve()) for checkout in checkouts]
    if options.json:
        keys = ("checkout",) if len(houses) == 1 else ("before", "after")
        results = {
            key: {"figures": figures(house), **{name: getattr(house, name) for name in vars(house)}}
            for key, house in zip(keys, houses, strict=True)
        }
        print(json.dumps(results, indent=1))
        return 0
    print(table(houses))
    if options.verbose:
        for checkout, house in zip(checkouts, houses, strict=True):
            print(f"\n{checkout}\n{details(house)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
