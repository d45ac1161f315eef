"""Refuses options of packages whose state no step can carry."""

from __future__ import annotations

from typing import Any

from txl_runtime.errors import UsageError

_ALONE = {
    "stream_emb": "num_residual_streams",
    "polar_pos_emb": "polar_pos_emb",
    "add_value_residual": "add_value_residual",
    "data_dependent_alibi": "attn_data_dependent_alibi",
    "qkv_receive_diff_residuals": "integrate_layers",
    "orthog_projected_values": "attn_orthog_projected_values",
}
"""Options of x-transformers by the attribute that each sets. Some fail in the package itself if there is a memory."""


def refuse_x_transformers(module: Any) -> None:
    """Refuse a wrapper without memory, with several output heads, with `probabilistic`, or with a PrefixDecoder."""
    rows, layers = getattr(module, "max_mem_len", None), getattr(module, "attn_layers", None)
    if layers is None or not rows or rows < 1:
        raise UsageError(
            f"max_mem_len of this {type(module).__name__} is {rows}, expected at least 1 in a TransformerWrapper or "
            "ContinuousTransformerWrapper: without it there is no memory; train it with one"
        )
    others = {
        "num_output_heads is above 1, expected 1: its logits are several tensors": _has(module, "has_multiple_heads"),
        "probabilistic is True, expected False: its output stacks means and variances": _has(module, "probabilistic"),
        "attn_layers is a PrefixDecoder, expected a Decoder: the mask of this one has no place for memories": (
            type(layers).__name__ == "PrefixDecoder"
        ),
    }
    for sentence, is_on in others.items():
        if is_on:
            raise UsageError(f"{sentence}; train it so, or give a StepSpec of your own")


def suspects(module: Any) -> list[str]:
    """Return the options of a module of x-transformers that may be the cause of a failure in the package itself."""
    return [option for name, option in _ALONE.items() if any(_has(part, name) for part in module.modules())]


def refuse_recurrent_memory(module: Any, attentions: list[Any]) -> None:
    """Refuse a module that is no RecurrentMemoryTransformer, or whose mask does not fit its keys."""
    if not attentions or not hasattr(module, "read_memory_emb"):
        raise UsageError(
            f"this {type(module).__name__} has no read_memory_emb, or no layers with null_kv; expected the "
            "RecurrentMemoryTransformer of recurrent-memory-transformer-pytorch"
        )
    plain = module.causal and not module.use_custom_causal_attn_mask
    if plain and (module.use_xl_memories or not attentions[0].attend.use_flash):
        raise UsageError(
            "memory_not_causal is False, expected True: the package's other mask counts neither the null key nor XL "
            "memories; train it with True, or with use_flash_attn and without XL memories"
        )


def refuse_short(length: int, memories: int, rows: int, always: bool) -> None:
    """Refuse a segment so short that the rows it keeps include read memories, which a first segment may lack."""
    if not always and length + memories < rows:
        raise UsageError(
            f"a segment of {length} keeps read memories among the {rows} rows of xl_mem_len, and with "
            "always_have_read_memories=False the first segment has none; expected segments of at least "
            f"{rows - memories}, xl_mem_len less num_memory_tokens: take longer ones"
        )


def _has(part: Any, name: str) -> bool:
    value = getattr(part, name, None)
    return value is not None and value is not False
