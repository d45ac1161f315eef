"""Verification of a Transformer-XL's bundle: the proof of any step, with the gates' names of earlier reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.listener import Listener, Silent
from txl_runtime.model import Model
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.families.transformer_xl.parity.oracle import Oracle
from txl_export.proof.comparing import MEMORY
from txl_export.proof.gates import OUTPUTS, STATES
from txl_export.proof.parity import Parity
from txl_export.proof.verification import verify_model

NAMES: Mapping[str, str] = {
    OUTPUTS: "log-probs max abs",
    STATES: f"{MEMORY} max abs (relative)",
    "drift of logprobs": "drift (late mean abs)",
    "state RMS error (of the standard deviation)": f"{MEMORY} RMS error (of the standard deviation)",
}
ADVICE = "see the table, and report the checkpoint's family and config"


def verify_models(
    manifest: Manifest,
    openers: Sequence[Callable[[], Model]],
    reference: PaperModel,
    source: str,
    text: Ids | None = None,
    segments: int | None = None,
    listener: Listener | None = None,
    stand_in_for: str | None = None,
) -> Parity:
    """Run the chains and the text, and judge them by the ladder.

    Args:
        openers: functions that load the bundle, one per update rule. The first loads what users get: it alone runs the
            long chains and the text.
        reference: the model it should be equal to.
        text: token ids [T] of real text; without it tokens are random, and only float32 is judged by its distribution.
        segments: number in the longest chain; None for enough to roll the memory over.
    """
    heard, tokens = listener or Silent(), manifest.tokens
    assert tokens is not None, "a Transformer-XL reads tokens"
    first, *others = openers
    oracle = Oracle(reference, manifest.transformer_xl.memory)
    samples = None if text is None else {tokens.name: text[None]}
    parity = verify_model(
        first, oracle, source, samples, segments, heard, stand_in_for, others=others, text=text, advice=ADVICE
    )
    gates = tuple(structs.replace(gate, name=NAMES.get(gate.name, gate.name)) for gate in parity.gates)
    return replace(parity, gates=gates)
