"""The inputs that int4's matrices are fitted to: what the reference multiplies them by on the first part of a text."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from txl_runtime.listener import Listener
from txl_runtime.types import Ids

from txl_export.families.transformer_xl.folding import QUANTISABLE
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_export.proof.threads import few_threads

SHARE = 0.8
"""Part of a text that is set apart to fit matrices to; the rest judges them."""

LANES, READ = 16, 32_000
"""Tokens of that part that are read, in 16 lanes that begin at equal distances; it has to have as many."""

SEGMENT = 64
"""Tokens of a lane that are read at a time, whatever L is: at the bundle's L of 1 it took 10 to 13 times as long."""


def split(text: Ids | None, fits: bool, heard: Listener) -> tuple[Ids | None, Ids | None]:
    """Return the tokens that matrices are fitted to, or None, and those that judge the bundle: int32 [T] each.

    If `fits`, as with int4, and the text is too short, a warning says that matrices are rounded.
    """
    if not fits:
        return None, text
    first = 0 if text is None else int(SHARE * len(text))
    if text is None or first < READ:
        found = "no text was given" if text is None else f"the text has {len(text):,} tokens"
        least = math.ceil(READ / SHARE)
        heard.warn(f"int4 matrices are rounded: {found}; --text or --tokens of {least:,} tokens would fit them to it")
        return None, text
    rest = len(text) - first
    heard.warn(f"int4 matrices are fitted to the text's first {first:,} tokens; the other {rest:,} are left to judge")
    return text[:first], text[first:]


def gather_inputs(reference: PaperModel, tokens: Ids, heard: Listener) -> dict[str, Tensor]:
    """Run the reference over segments in a chain; return the sum of x xᵀ over every matrix's inputs x.

    Args:
        reference: the model, which goes on to report its inputs: give it one of its own.
        tokens: int [T], at least `READ`.

    Returns:
        float64 [in, in] by the folded name of the matrix, e.g. "layers.00.attention.query_key_value.weight"; none for
        a matrix that met infinity or NaN, of which a warning tells.
    """
    starts = torch.arange(LANES)[:, None] * (len(tokens) // LANES)
    lanes = torch.from_numpy(tokens)[starts + torch.arange(READ // LANES)]
    segments = torch.split(lanes, SEGMENT, dim=1)
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor) -> None:
        # Keys and values are of memory, too; each of its rows was a row of a segment before.
        folded = f"{name}.weight".replace(".query.", ".query_key_value.").replace(".key.", ".query_key_value.")
        if folded.endswith(QUANTISABLE):
            rows = x[:, -segment.shape[1] :].flatten(end_dim=1).double()
            sums[folded] = sums[folded] + rows.T @ rows if folded in sums else rows.T @ rows

    heard.stage("gather the inputs of int4 matrices", len(segments))
    reference.watch = add
    with few_threads(reference.dtype == torch.float64):
        memory = reference.initial_memory(LANES)
        for segment in segments:
            _, memory = reference.hidden(segment, memory)
            heard.advance()
    finite = {name: found for name, found in sums.items() if bool(found.isfinite().all())}
    if strange := sorted(sums.keys() - finite.keys()):
        heard.warn(f"{strange[0]} and {len(strange) - 1} others met infinity or NaN in the text; they are rounded")
    return finite
