"""Gathers the inputs of matrices to which int4 weights are fitted: the reference runs on the first part of a text."""

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
"""Share of a text's tokens to which matrices are fitted; all other tokens are kept to judge the bundle."""

LANES, READ = 16, 32_000
"""`READ` tokens of the share `SHARE` are read, in `LANES` sequences that begin at equal distances. A share with fewer
tokens is not used."""

SEGMENT = 64
"""Number of tokens of each sequence per call of the reference, for any L of the bundle: with L = 1, calls of one token
took 10 to 13 times as long."""


def split(text: Ids | None, fits: bool, listener: Listener) -> tuple[Ids | None, Ids | None]:
    """Split a text into tokens to fit matrices to (or None) and tokens to judge the bundle: int32 [T] each.

    Nothing is split unless `fits` is true, as for int4. If the text is too short, a warning says that matrices are
    rounded instead. For example, a long text [T] becomes two parts whose lengths add up to T; a text of 10 tokens is
    not split.
    """
    if not fits:
        return None, text
    first = 0 if text is None else int(SHARE * len(text))
    if text is None or first < READ:
        reason = "no text was given" if text is None else f"the text has {len(text):,} tokens"
        least = math.ceil(READ / SHARE)
        listener.warn(
            f"int4 matrices are rounded: {reason}; --text or --tokens of {least:,} tokens would fit them to it"
        )
        return None, text
    rest = len(text) - first
    listener.warn(
        f"int4 matrices are fitted to the text's first {first:,} tokens; the other {rest:,} are left to judge"
    )
    return text[:first], text[first:]


def gather_inputs(reference: PaperModel, tokens: Ids, listener: Listener) -> dict[str, Tensor]:
    """Run the reference over segments in a chain; sum x xᵀ over all inputs x of each matrix.

    For example, a matrix [32, 96] gets float64 [32, 32].

    Args:
        reference: a model of the caller's that no other code uses: its `watch` stays set.
        tokens: int [T], at least `READ`.

    Returns:
        float64 [in, in] by the folded name of the matrix, e.g. "layers.00.attention.query_key_value.weight"; a matrix
            that met infinity or NaN is left out, with a warning.
    """
    starts = torch.arange(LANES)[:, None] * (len(tokens) // LANES)
    lanes = torch.from_numpy(tokens)[starts + torch.arange(READ // LANES)]
    segments = torch.split(lanes, SEGMENT, dim=1)
    sums: dict[str, Tensor] = {}

    def add(name: str, x: Tensor) -> None:
        # Only the last rows of x, the segment's, are added: rows of memory were added with their own segment. For
        # absolute positions with pre-norm, queries and keys have different inputs and share one matrix, so both are
        # added.
        folded = f"{name}.weight".replace(".query.", ".query_key_value.").replace(".key.", ".query_key_value.")
        if folded.endswith(QUANTISABLE):
            rows = x[:, -segment.shape[1] :].flatten(end_dim=1).double()
            sums[folded] = sums[folded] + rows.T @ rows if folded in sums else rows.T @ rows

    listener.stage("gather the inputs of int4 matrices", len(segments))
    reference.watch = add
    with few_threads(reference.dtype == torch.float64):
        memory = reference.initial_memory(LANES)
        for segment in segments:
            _, memory = reference.hidden(segment, memory)
            listener.advance()
    finite = {name: total for name, total in sums.items() if bool(total.isfinite().all())}
    if strange := sorted(sums.keys() - finite.keys()):
        listener.warn(f"{strange[0]} and {len(strange) - 1} others met infinity or NaN in the text; they are rounded")
    return finite
