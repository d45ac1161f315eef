"""Print the table of docs/models.md: other packages' models, exported as users do, run, and built into engines.

python benchmarks/parity/models_table.py [CASE…]

Each row is a stored case of tests/fixtures/oracle_stateful. The script needs the packages that `make packages`
installs. A case whose package is missing is exported from a minimal module with the same tensors, and has the figures
of that module.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "helpers"))

import txl_export
from model_forms import ADAPTED, WRITTEN, Form, differences, form_of
from oracle_stateful import GROWTH, Case, run_bundle
from txl_engines import build_bundle
from txl_runtime.errors import TxlError

GPU = 86
HEADER = ("model", "its memory", "how", "state tensors", "growth", "sequences", "TensorRT-RTX", "outputs", "states")
MODELS = {
    "xt01_rotary_shift": ("x-transformers with `max_mem_len`, rotary, shifted", "newest hidden rows of each layer"),
    "xt02_t5_bias": ("x-transformers, T5 bias (ALiBi likewise)", "newest hidden rows of each layer"),
    "gd01_policy_step": ("GTrXL of DI-engine", "newest hidden rows of each layer, zeros at first"),
    "gr01_policy_step": ("GTrXL of RLlib", "newest hidden rows of each unit, zeros at first"),
    "mm01_episodic": (
        "TrXL-PPO, episodic-transformer-memory-ppo",
        "a row for each step of the episode, and its number",
    ),
    "rp01_lstm_policy": (
        "LSTM and GRU policies: rsl_rl (Isaac Lab), rl_games, sb3's RecurrentPPO",
        "hidden and cell state",
    ),
    "rm01_xl": (
        "recurrent-memory-transformer-pytorch, with XL memory",
        "memory tokens; keys and values of the segment",
    ),
    "rm02_no_xl": ("recurrent-memory-transformer-pytorch", "memory tokens"),
    "em01_emformer": ("Emformer of torchaudio", "keys and values to the left, a bank of summaries"),
    "ma01_mamba": ("Mamba of mambapy", "last inputs of a convolution, and the filters' state"),
    "xn01_uni": ("XLNet of transformers", "newest hidden rows of each layer"),
    "rw01_rwkv": ("RWKV 4 of transformers", "last inputs, and a sum kept in three parts"),
    "rb01_rmt_gpt2": ("Recurrent Memory Transformer over GPT-2", "memory tokens, a learned start"),
    "lc01_labml": ("Compressive Transformer of labml-nn", "newest rows, and older ones compressed"),
    "ct01_base": ("compressive-transformer-pytorch", "newest rows, and older ones compressed"),
    "ct02_partial_segment": ("the same, with shorter segments between", "newest rows, and older ones compressed"),
    "mt01_knn": ("memorizing-transformers-pytorch", "newest keys and values, and a store that is searched"),
    "br01_block_recurrent": ("block-recurrent-transformer-pytorch", "state vectors, a learned start; keys and values"),
    "as01_adaptive_span": ("adaptive-span", "hidden rows of each layer's span, zeros at first"),
    "ut01_act": ("Universal Transformer with adaptive computation time", "none; hops end by position"),
    "kn01_knnlm": ("kNN-LM", "none; a datastore outside of the model"),
}
"""Every stored case in the page's order: the model, and the state that it carries from step to step."""
MINIMAL = {"as01_adaptive_span": "adaptive_span", "ut01_act": "universal", "kn01_knnlm": "nearest_neighbours"}
"""Cases whose code is on no package index: the name of the minimal module in tests/stand_ins/stateful."""


def main(names: list[str]) -> None:
    """Print the table's head, and a row for each named case, or for all cases."""
    if unknown := [name for name in names if name not in MODELS]:
        sys.exit(f"there is no case {', '.join(unknown)}, expected {', '.join(MODELS)}; usage: models_table.py [CASE…]")
    print(f"| {' | '.join(HEADER)} |")
    print("|" + "---|" * len(HEADER))
    for name in names or MODELS:
        print(f"| {' | '.join(line(name))} |", flush=True)


def line(name: str) -> tuple[str, ...]:
    """Return the cells of a case's row, in the order of `HEADER`."""
    return (*words(name), *figures(name))


def words(name: str) -> tuple[str, str, str]:
    """Return the first cells of a row: the model with a link, its memory, and the way it is exported."""
    model, memory = MODELS[name]
    if adapter := ADAPTED.get(name):
        return f"[{model}](adapters.md#{adapter})", memory, f"adapter `{adapter}`"
    file = f"own_modules/{WRITTEN[name]}.py" if name in WRITTEN else f"stand_ins/stateful/{MINIMAL[name]}.py"
    return f"[{model}](../tests/{file})", memory, "own module"


def figures(name: str) -> tuple[str, ...]:
    """Export, run and build a case, and return the remaining cells of its row."""
    case = Case(name)
    form = form_of(case)
    with tempfile.TemporaryDirectory() as folder:
        result = exported(case, form, Path(folder) / "model.txl", growth=GROWTH.get(name, "auto"))
        manifest = result.manifest
        logprobs = next((entry.name for entry in manifest.outputs if entry.role == "logprobs"), None)
        outputs, states = differences(run_bundle(case, result.path), case, _new(form, logprobs))
        if manifest.family.get("growth") == "symbolic":
            result = exported(case, form, Path(folder) / "stages.txl", growth="stages")
        engines = engines_of(result)
    none = "a counter" if _counts(manifest) else "none"
    growth = {"": none, "symbolic": "any number of rows", "stages": f"{len(manifest.programs)} graphs"}
    return (
        ", ".join(_states(manifest)) or "none",
        growth[str(manifest.family.get("growth"))],
        manifest.streams,
        engines,
        f"{outputs:.0e}",
        f"{states:.0e}" if manifest.states else "none",
    )


def exported(case: Case, form: Form, path: Path, **options: Any) -> Any:
    """Export a case in the form in which its users would, without verification."""
    lengths = case.segment_lengths()
    return txl_export.export(
        form.spec, path, batch_size=case.batch_size, segment_length=lengths, verify=False, **options
    )


def _new(form: Form, logprobs: str | None) -> str | None:
    """Return the output's name if the export turned its logits into log-probabilities, else None."""
    declared = {entry.name: entry.role for entry in form.spec.outputs if not isinstance(entry, str)}
    return logprobs if declared.get(logprobs or "") == "logits" else None


def _counts(manifest: Any) -> bool:
    """Return True if the model has a state of int32, which counts the rows that each sequence has filled."""
    return any(entry.dtype == "int32" for entry in manifest.states)


def _states(manifest: Any) -> list[str]:
    """Return the shapes of the states with B for the batch, and how many have each shape, e.g. ["2 × [1, B, 64]"]."""
    results: dict[str, int] = {}
    for entry in manifest.states:
        rows = None if entry.row_axis is None else f"0…{entry.shape[entry.row_axis]}"
        shape = f"[{', '.join(map(str, entry.axes.filled('B', rows)))}]"
        results[shape] = results.get(shape, 0) + 1
    return [f"{count} × {shape}" if count > 1 else shape for shape, count in results.items()]


def engines_of(made: Any) -> str:
    """Build a bundle's TensorRT-RTX engines; return e.g. "2 built", or "refused: " with the reason."""
    try:
        return f"{len(build_bundle(made.path, 'rtx', gpus=(GPU,)).engines)} built"
    except TxlError as error:
        return f"refused: {error}"


if __name__ == "__main__":
    main(sys.argv[1:])
