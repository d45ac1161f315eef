"""Chooses the dialect, sizes and form of memory of a bundle from an export's options and its checkpoint.

M, the clamp and same_length usually differ in evaluation from the training values in a file. So options come first,
`--config` second, the file last. A warning names the values taken from a file; an error names the flag of a setting
that is missing everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig
from txl_runtime.errors import UsageError
from txl_runtime.listener import Listener

from txl_export.checkpoints.imported import Imported
from txl_export.families.transformer_xl.network import MemoryForm
from txl_export.options import ExportOptions

MOST_SEGMENT, MOST_MEMORY, MOST_BATCH = 8192, 65536, 1024
"""Largest L in tokens, M in rows and B in sequences that an export accepts."""
DEFAULT_SEGMENT_LENGTHS = (64, 1)
LOOKUP = 5
"""Number of tokens of a segment with `--lookup`: the last drawn token and a draft of 4."""
LOOKED_UP, FEATURES = "of which a part of a segment can be kept", "whose programs return rows"
"""Properties of a ring memory that `--lookup` and `--features` need, as messages say them."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a bundle: batch size B, segment lengths L (longest first), memory length M in rows.

    `batch_sizes` are smaller B, largest first, for which engines are built, too.
    """

    batch_size: int
    segment_lengths: tuple[int, ...]
    memory_length: int
    batch_sizes: tuple[int, ...] = ()


def resolve(imported: Imported, options: ExportOptions) -> tuple[Dialect, Sizes, tuple[str, ...]]:
    """Return dialect, sizes, and warnings that name values taken from the file and options that override it.

    Raises:
        UsageError: a size is out of range, a setting is missing, or settings contradict each other.
    """
    file = imported.evaluation
    defaults: list[str] = []
    lines: list[str] = []

    def choose(name: str, flag: str, asked: int | None, own: int | None) -> int:
        if asked is not None:
            if own is not None and asked != own:
                lines.append(f"{flag} overrides the checkpoint's own value: {asked} instead of {own}")
            return asked
        if own is None:
            raise UsageError(f"{name} is not in the checkpoint, expected a value; give {flag}")
        defaults.append(f"{flag} {own}")
        return own

    memory = choose("the memory length", "--memory-length", options.memory_length, file.memory_length)
    clamp = choose("the clamp length", "--clamp-length", options.clamp_length, file.clamp_length)
    same = choose("same_length", "--same-length/--no-same-length", options.same_length, file.same_length)
    if options.same_length is None:
        defaults[-1] = "--same-length" if same else "--no-same-length"
    lengths = tuple(sorted(set(options.segment_lengths or DEFAULT_SEGMENT_LENGTHS), reverse=True))
    for length in lengths:
        _in_range("--segment-length", length, 1, MOST_SEGMENT)
    _in_range("--memory-length", memory, 0, MOST_MEMORY)
    for flag, value, what in (("--lookup", options.lookup, LOOKED_UP), ("--features", options.features, FEATURES)):
        if value:
            _requires_ring(flag, what, imported.config, memory, options)
    if options.lookup:
        lengths = tuple(sorted({*lengths, LOOKUP}, reverse=True))
    _in_range("--clamp-length", clamp, -1, MOST_MEMORY + MOST_SEGMENT, "; 0 or -1 is no clamp")
    for size in options.batch_sizes:
        _in_range("--batch-size", size, 1, MOST_BATCH)
    batch, *others = sorted(options.batch_sizes, reverse=True)
    _fits(imported, batch, lengths[0], memory)
    of_segment = bool(same) and imported.window_of == "segment"
    window = memory + imported.window_beyond_memory if same and not of_segment else None
    if window == 0:
        raise UsageError(
            "--same-length with --memory-length 0 leaves a query nothing to attend to, expected one or the other; "
            "give --no-same-length or a memory"
        )
    if options.lookup and window is not None:
        lines.append(
            f"with a window of {window} keys a segment gives what single steps give: --lookup adds L {LOOKUP} alone"
        )
    dialect = Dialect(
        family=imported.family,
        memory_start=imported.memory_start,
        window=window,
        segment_window=of_segment,
        single_steps=LOOKUP if options.lookup and window is None else None,
        clamp_length=clamp if clamp > 0 else None,
    )
    if defaults:
        lines.append(f"not given, so as the checkpoint or --config has it, often for training: {' '.join(defaults)}")
    return dialect, Sizes(batch, lengths, memory, tuple(others)), tuple(lines)


def memory_form(config: ModelConfig, sizes: Sizes, options: ExportOptions, listener: Listener) -> MemoryForm:
    """Return the form of memory: the option's, else "kv", or "hidden" if memory rows contain absolute positions."""
    if options.memory is None and config.absolute_positions and sizes.memory_length:
        listener.warn(f"attn_type {config.attn_type} keeps positions in its memory: hidden memory")
        return "hidden"
    return "hidden" if options.memory == "hidden" else "kv"


def _requires_ring(flag: str, what: str, config: ModelConfig, memory: int, options: ExportOptions) -> None:
    """Refuse a flag if the bundle has no ring of keys and values; `what` names the flag's effect in the message."""
    reason = ""
    if config.absolute_positions:
        reason = f"a model of attn_type {config.attn_type}, whose memory holds positions"
    elif options.memory == "hidden" or not memory:
        reason = "--memory hidden" if memory else "--memory-length 0"
    if reason:
        raise UsageError(
            f"{flag} is given with {reason}, expected a memory of keys and values, {what}; leave one of them out"
        )


def _fits(imported: Imported, batch: int, length: int, memory: int) -> None:
    """Refuse sinusoids of odd width, segments longer than learned positions, and sizes that are too large together.

    Engines index with int32. A graph holds the distances and must stay below 2 GiB.
    """
    config, keys = imported.config, memory + length
    if config.d_model % 2 and config.attn_type in (0, 2):
        raise UsageError(
            f"d_model is {config.d_model}, expected an even number: positions are pairs of a sine and a cosine; "
            "check the config against the code that trained it"
        )
    if config.attn_type == 3 and length > config.position_rows:
        raise UsageError(
            f"--segment-length is {length}, expected at most {config.position_rows}, "
            "for so many positions the model has learned; give a smaller one"
        )
    tensors = {
        "the attention scores of one segment": (batch * config.n_head * length * keys, 2**31 - 1),
        "the log-probabilities of one segment": (batch * length * config.vocab_size, 2**31 - 1),
        "the memory of one layer": (batch * memory * max(config.n_head * config.d_head, config.d_model), 2**31 - 1),
        "the distances of one segment": (length * keys, 2**28),
    }
    for name, (values, most) in tensors.items():
        if values > most:
            raise UsageError(
                f"{name} would be {values * 4 / 1e9:.0f} GB with --segment-length {length}, --memory-length {memory}, "
                f"--batch-size {batch}, expected at most {most * 4 / 1e9:.0f}; make one of them smaller"
            )


def _in_range(flag: str, value: int, least: int, most: int, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{flag} is {value}, expected a whole number of {least} … {most}{more}")
