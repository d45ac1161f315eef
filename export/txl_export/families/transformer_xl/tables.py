"""Makes the tables of a Transformer-XL's bundle: inputs and outputs of its programs, and the memory between them.

The manifest contains these tables, and graphs are traced to fit them.
"""

from __future__ import annotations

from txl_runtime.bundle.tables import STATE_DTYPES, Program, StateTensor, TensorSpec, ring_slots
from txl_runtime.bundle.transformer_xl import ModelConfig


def expected_states(
    config: ModelConfig,
    memory: str,
    batch_size: int,
    memory_length: int,
    updates: tuple[str, ...],
    longest: int,
    precision: str = "fp32",
) -> tuple[StateTensor, ...]:
    """Return the table of states for update rules and the longest segment L; () if the memory length M is 0."""
    if not memory_length:
        return ()
    ring, columns = ring_slots(memory_length, longest)
    table = []
    for update in updates:
        slots = columns if update == "ring" else memory_length
        roles, axis = (("key", "value"), 2) if memory == "kv" else (("hidden",), 1)
        kv_shape = (batch_size, config.n_head, slots, config.d_head)
        shape = kv_shape if memory == "kv" else (batch_size, slots, config.d_model)
        names = [f"layers.{i:02d}.{role}" for i in range(config.n_layer) for role in roles]
        table += [
            StateTensor(
                name=name,
                input=f"memory.{name}",
                output=f"new_memory.{name}",
                dtype=STATE_DTYPES.get(precision, "float32"),
                shape=shape,
                row_axis=axis,
                update=update,
                slots=ring if update == "ring" else None,
            )
            for name in names
        ]
    return tuple(table)


def segment_program(
    config: ModelConfig,
    states: tuple[StateTensor, ...],
    batch_size: int,
    length: int,
    kind: str,
    update: str,
    features: bool = False,
) -> Program:
    """Return a program that runs segments.

    Args:
        config: the model.
        states: the states of all update rules.
        batch_size: B; an open axis if B is more than 1.
        length: tokens of a segment.
        kind: "logprobs" or "hidden"; for engines also "last" or "score". Softmax inputs and outputs are float32 always.
        update: "rolled" or "ring".
        features: whether "hidden" rows end with the input of the last feed-forward layer.
    """
    mine = [state for state in states if state.update == update]
    counts = ("valid", "fill", "head") if update == "ring" else ("valid", "fill")
    width = (1 + features) * config.d_model
    results = {
        "logprobs": TensorSpec(name="logprobs", dtype="float32", shape=(batch_size, length, config.vocab_size)),
        "hidden": TensorSpec(name="hidden", dtype="float32", shape=(batch_size, length, width)),
        "last": TensorSpec(name="logprobs", dtype="float32", shape=(batch_size, config.vocab_size)),
        "score": TensorSpec(name="nll", dtype="float32", shape=(batch_size, length)),
    }
    read = ("tokens", "targets") if kind == "score" else ("tokens",)
    name = f"{kind}-{length}" if update == "rolled" else f"{kind}-{update}-{length}"
    return Program(
        name=name,
        kind=kind,
        segment_length=length,
        update=update,
        file=f"{name}.onnx" if update == "rolled" else f"{kind}-{update}.onnx",
        inputs=(
            *(TensorSpec(name=ids, dtype="int32", shape=(batch_size, length)) for ids in read),
            *(TensorSpec(name=count, dtype="int32", shape=(batch_size,)) for count in counts),
            *(TensorSpec(name=state.input, dtype=state.dtype, shape=state.shape) for state in mine),
        ),
        outputs=(
            results[kind],
            *(TensorSpec(name=state.output, dtype=state.dtype, shape=state.shape) for state in mine),
        ),
        open_batch=batch_size > 1,
    )


def softmax_program(config: ModelConfig, cluster: int, features: bool = False) -> Program:
    """Return the program of a cluster's words; cluster 0 gives the head, with a column for each further cluster.

    With `features`, its input rows have 2 D numbers.
    """
    first, last = config.clusters[cluster]
    columns = last - first + (0 if cluster else len(config.clusters) - 1)
    name = f"tail.{cluster}" if cluster else "head"
    return Program(
        name=name,
        kind=name,
        segment_length=0,
        update="none",
        file=f"{name}.onnx",
        inputs=(TensorSpec(name="hidden", dtype="float32", shape=("rows", (1 + features) * config.d_model)),),
        outputs=(TensorSpec(name="logprobs", dtype="float32", shape=("rows", columns)),),
    )


def expected_programs(
    config: ModelConfig,
    states: tuple[StateTensor, ...],
    batch_size: int,
    lengths: tuple[int, ...],
    updates: tuple[str, ...],
    features: bool = False,
) -> tuple[Program, ...]:
    """Return a bundle's programs: ring programs that end with hidden rows, softmax programs, and rolled programs."""
    programs = []
    if "ring" in updates:
        programs += [
            segment_program(config, states, batch_size, length, "hidden", "ring", features) for length in lengths
        ]
    programs += [softmax_program(config, cluster, features) for cluster in range(len(config.clusters))]
    if "rolled" in updates:
        programs += [segment_program(config, states, batch_size, length, "logprobs", "rolled") for length in lengths]
    return tuple(programs)
