"""Prove that a change to verification weakens no verdict: two checkouts verify good and faulty bundles.

    python benchmarks/compare/verdicts.py OLD NEW [--only WORD ...] [--json FILE]

Both checkouts have a `.venv`. OLD exports the bundles, once: Transformer-XLs in every precision, models with steps of
their own, and every case of both oracles. Both checkouts verify each bundle against its checkpoint or its module, as it
is, and with each fault of `tests/helpers/seeded_bundle_faults.py` that fits the bundle. Cases of the oracles have one
fault in an output and one in a state. Each printed line has one bundle's verdicts by both checkouts, with the gates
that failed. The last line has the numbers of verdicts that are the same, better and worse. A verdict is worse if NEW
misses a fault that OLD finds, or refuses a good bundle that OLD accepts. Exit code 1 says that a verdict is worse.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "helpers"))

SMALL = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 5e-2, "int4": 2e-1}
"""The size of an injected fault by precision: several times the rounding error of that precision."""
WINDOWED = {"same_length": True, "clamp_length": 4}
STEPS = "tests/stand_ins/small_steps.py"


@dataclass(frozen=True)
class Case:
    """A bundle to export and verify.

    Attributes:
        name: the bundle's name.
        config: changes to a small Transformer-XL's config; None for a user's own step.
        options: options of the export.
        source: a user's own step, FILE.py:FUNCTION below this checkout.
        oracle: a case of `tests/helpers/oracle.py` or `tests/helpers/oracle_stateful.py` instead of a config or source.
        faults: the faults to inject: "all" of the bundle's kind, "one each" in an output and a state, or "none".
    """

    name: str
    config: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    oracle: str = ""
    faults: Literal["all", "one each", "none"] = "all"

    @property
    def precision(self) -> str:
        """Return the bundle's precision."""
        return str(self.options.get("precision", "fp32"))


PLAIN = {"segment_length": (4, 1), "verify": False}
OWN = (
    Case("xl fp32", WINDOWED, PLAIN | {"batch_size": 3}),
    Case("xl fp16", WINDOWED, PLAIN | {"batch_size": 3, "precision": "fp16"}),
    Case("xl int8", WINDOWED, PLAIN | {"batch_size": 3, "precision": "int8"}),
    Case("xl bf16", WINDOWED, PLAIN | {"batch_size": 2, "precision": "bf16"}, faults="none"),
    Case("xl int4", WINDOWED, PLAIN | {"precision": "int4"}, faults="none"),
    Case("xl hidden memory", {}, PLAIN | {"batch_size": 2, "memory": "hidden"}, faults="none"),
    Case("xl adaptive", {"cutoffs": [20, 40], "div_val": 2}, PLAIN, faults="none"),
    Case("xl zeros, pre-norm", {"memory_start": "zeros", "pre_lnorm": True}, PLAIN, faults="none"),
    Case("xl without memory", {"memory_length": 0}, PLAIN | {"memory_length": 0}, faults="none"),
    Case("lstm fp32", None, {"segment_length": (4, 1), "batch_size": 3}, "samples/policy/lstm.py:build"),
    Case(
        "lstm fp16",
        None,
        {"segment_length": (4, 1), "batch_size": 3, "precision": "fp16"},
        "samples/policy/lstm.py:build",
    ),
    Case("policy", None, {"batch_size": 3}, f"{STEPS}:policy"),
    Case("cell", None, {"batch_size": 3}, f"{STEPS}:cell"),
    Case("growing, lockstep", None, {"segment_length": (3, 1), "batch_size": 3}, f"{STEPS}:growing"),
    Case("absent at first", None, {"batch_size": 3}, f"{STEPS}:absent"),
    Case("counted", None, {"segment_length": (6, 1), "batch_size": 3}, f"{STEPS}:counted"),
    Case("amplifying", None, {"batch_size": 3}, f"{STEPS}:chaotic"),
)


def cases() -> Iterator[Case]:
    """Yield all cases: `OWN`, all cases of both oracles in float32, and some of their cases in lower precisions."""
    from oracle import LANGUAGE_MODELS, refuses_kv
    from oracle_stateful import BUILDS

    yield from OWN
    for name in LANGUAGE_MODELS:
        for memory in ("hidden",) if refuses_kv(name) else ("kv", "hidden"):
            yield Case(f"oracle {name} {memory}", {}, {"memory": memory}, oracle=name, faults="one each")
    for name, precision in (("kimiyoung/k01_base", "int8"), ("nvidia/n12_adp_div2", "fp16")):
        options = {"memory": "kv", "precision": precision}
        yield Case(f"oracle {name} {precision}", {}, options, oracle=name, faults="one each")
    for name in BUILDS:
        yield Case(f"stateful {name}", oracle=name, faults="one each")
    for name in ("gd01_policy_step", "rp01_lstm_policy", "ma01_mamba"):
        yield Case(f"stateful {name} fp16", None, {"precision": "fp16"}, oracle=name, faults="one each")


def made(case: Case, folder: Path, here: Path) -> dict[str, Any]:
    """Export a case to good.txl in a folder, and return the arguments of its verification, e.g. {"module": "…"}.

    Args:
        case: the case.
        folder: the folder.
        here: the checkout with the files of own modules.
    """
    import torch
    import txl_export
    from support import random_state, save_checkpoint, small_config

    path = folder / "good.txl"
    if case.oracle:
        return made_of_oracle(case, folder)
    if case.config is not None:
        config = small_config(**case.config)
        checkpoint = save_checkpoint(folder / "model.pt", config, random_state(config))
        txl_export.export(checkpoint, path, **case.options)
        return {"checkpoint": str(checkpoint)}
    torch.manual_seed(0)
    txl_export.export(str(here / case.source), path, **case.options | {"verify": False})
    return {"module": str(here / case.source)}


def made_of_oracle(case: Case, folder: Path) -> dict[str, Any]:
    """Export a case of an oracle, and return the arguments of its verification.

    A Transformer-XL without a checkpoint file has no arguments, and is verified against the bundle's weights.
    """
    import oracle
    import oracle_stateful

    if case.config is None:
        one = oracle_stateful.Case(case.oracle)
        growth = oracle_stateful.GROWTH.get(case.oracle, "auto")
        oracle_stateful.export_case(one, folder / "good.txl", growth=growth, **case.options)
        return {"stateful": case.oracle}
    source, _, result = oracle.export_case(case.oracle, folder=folder, **case.options)
    result.path.rename(folder / "good.txl")
    return {"checkpoint": str(source)} if isinstance(source, Path) else {}


def faults_of(case: Case, bundle: Path) -> dict[str, Any]:
    """Return the faults to inject into a bundle by title: functions that alter the bundle at a path."""
    from seeded_bundle_faults import step_faults, transformer_xl_faults, with_constant
    from txl_runtime.bundle.reading import open_bundle

    manifest, small = open_bundle(bundle).manifest, SMALL[case.precision]
    if case.faults == "none":
        return {}
    if case.faults == "one each":
        names = [one.name for one in manifest.outputs if one.dtype == "float32"][:1]
        names += [one.output for one in manifest.states if one.dtype == "float32"][-1:]
        return {f"{name} is off": with_constant(name, "Add", 20 * small) for name in names}
    if case.config is not None:
        return transformer_xl_faults(manifest.vocab_size, small, quantised=case.precision in ("int8", "int4"))
    outputs = [output.name for output in manifest.outputs if output.dtype == "float32"]
    floats = [state for state in manifest.states if state.dtype == "float32" and state.batch_axis is not None]
    return step_faults(outputs, [(state.output, state.input, state.batch_axis or 0) for state in floats], small)


def verdicts(folder: Path, given: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield for every bundle in a folder its name and its failed gates, or the error that ended its verification."""
    import oracle_stateful
    import torch
    import txl_export
    from txl_runtime.errors import TxlError

    torch.set_num_threads(1)
    stateful = given.pop("stateful", "")
    for path in sorted(folder.glob("*.txl")):
        torch.manual_seed(0)  # so that own modules, which draw their weights when they are made, get the same
        try:
            more: dict[str, Any] = {"module": oracle_stateful.Case(stateful).build()} if stateful else {}
            parity = txl_export.verify(path, threads=1, **given, **more)
        except TxlError as error:
            yield path.stem, [f"refused: {type(error).__name__}"]
            continue
        yield path.stem, [gate.name for gate in parity.gates if gate.passed is False]


def asked(checkout: Path, folder: Path, given: dict[str, Any]) -> dict[str, list[str]]:
    """Let a checkout verify all bundles in a folder; return their failed gates by name, [] for a bundle that passed."""
    command = [checkout / ".venv" / "bin" / "python", __file__, "--worker", folder, json.dumps(given)]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{checkout} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def compared(case: Case, old: Path, new: Path) -> Iterator[dict[str, Any]]:
    """Export a case with `old`, let both checkouts verify it as it is and with each fault; yield a line for each."""
    with tempfile.TemporaryDirectory(prefix="verdicts-") as place:
        folder = Path(place)
        command = [old / ".venv" / "bin" / "python", __file__, "--make", case.name, folder]
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{case.name} was not exported: {ended.stderr[-2000:]}")
        given = json.loads(ended.stdout.splitlines()[-1])
        titles = {"good": "as it is"}
        for number, (title, put) in enumerate(faults_of(case, folder / "good.txl").items()):
            copy = shutil.copytree(folder / "good.txl", folder / f"fault{number:03d}.txl")
            put(copy)
            titles[copy.stem] = title
        before, after = (asked(checkout, folder, given) for checkout in (old, new))
        for stem, title in titles.items():
            yield {"case": case.name, "fault": title, "old": before[stem], "new": after[stem]} | {
                "verdict": verdict(stem == "good", bool(before[stem]), bool(after[stem]))
            }


def verdict(good: bool, before: bool, after: bool) -> str:
    """Compare both checkouts' verdicts on a bundle: "same", "better" or "WORSE".

    Args:
        good: True if the bundle has no fault.
        before: True if the bundle failed in OLD.
        after: True if it failed in NEW.
    """
    if before == after:
        return "same"
    return "better" if after != good else "WORSE"


def main() -> int:
    """Read the command line, compare all cases, and print their lines; or do the work of one checkout's process."""
    here = Path(__file__).resolve().parents[2]
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(dict(verdicts(Path(sys.argv[2]), json.loads(sys.argv[3])))))
        return 0
    if sys.argv[1:2] == ["--make"]:
        (case,) = (case for case in cases() if case.name == sys.argv[2])
        print(json.dumps(made(case, Path(sys.argv[3]), here)))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, help="checkout before the change")
    parser.add_argument("new", type=Path, help="checkout after it")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="bundles whose names hold one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all lines there")
    options = parser.parse_args()
    lines = []
    for case in cases():
        if options.only and not any(word in case.name for word in options.only):
            continue
        for line in compared(case, options.old.resolve(), options.new.resolve()):
            lines.append(line)
            old, new = ("; ".join(line[side]) or "passed" for side in ("old", "new"))
            print(f"{line['verdict']}: {case.name}, {line['fault']}: {old} | {new}", flush=True)
    counts = {name: sum(line["verdict"] == name for line in lines) for name in ("same", "better", "WORSE")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1))
    return int(counts["WORSE"] > 0)


if __name__ == "__main__":
    sys.exit(main())
