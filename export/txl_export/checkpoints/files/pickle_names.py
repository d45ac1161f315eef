"""What a pickle may refer to, and the plain data that stands for it.

No name leads to the real class or function: an object becomes a `Stub`, a storage its elements, and the few functions
in FUNCTIONS are this module's own, which make dictionaries, lists and tensors. A name that is in none of the three
tables (STUBS, FUNCTIONS, STORAGE_TYPES) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from txl_runtime.errors import CheckpointError

from txl_export.checkpoints.files.budget import OBJECT, TEXT, VIEW, Budget

DIMENSION_LIMIT = 16


@dataclass(eq=False, repr=False)
class Stub:
    """An inert stand-in for an object of a class the file names.

    Attributes:
        class_name: the dotted name, as in the file or as an alias translated it.
        state: what the pickle would have put into __dict__; {} if nothing, or for a class or function itself.
        args: what the class or function was called with, e.g. the value of an enum's member.
        built: what an object of `OPAQUE` was built with, or one of `SCRIPTED` that has no attributes.
        budget: the work that the file may ask for; whoever walks through what the object holds charges it.
    """

    class_name: str
    state: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    built: Any = None
    budget: Budget = field(default_factory=lambda: Budget(0))

    def __repr__(self) -> str:
        return f"Stub({self.class_name})"


class Name(Stub):
    """A class or function the file names, not an object made with it."""


@dataclass(eq=False)
class Storage:
    """The elements of one storage (or of a part of it), and the tensors already made of them.

    Equal views are one tensor object, so that ties are found with `is` in state dicts too.
    """

    elements: Tensor
    views: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = field(default_factory=dict)


STORAGE_TYPES = {
    f"{module}.{kind}Storage": dtype
    for module in ("torch", "torch.cuda")
    for kind, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}

# Names whose objects become stubs, by the modules they are in.
_STUB_NAMES = {
    "mem_transformer": "AdaptiveEmbedding DecoderLayer MemTransformerLM MultiHeadAttn PositionalEmbedding "
    "PositionwiseFF RelLearnableDecoderLayer RelLearnableMultiHeadAttn RelMultiHeadAttn "
    "RelPartialLearnableDecoderLayer RelPartialLearnableMultiHeadAttn",
    "proj_adaptive_softmax utils.proj_adaptive_softmax": "Projection ProjectedAdaptiveLogSoftmax",
    "data_parallel utils.data_parallel": "BalancedDataParallel",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.nn.parallel.distributed apex.parallel.distributed": "DistributedDataParallel",
    "torch.nn.modules.activation": "CELU ELU GELU GLU LeakyReLU LogSigmoid LogSoftmax Mish MultiheadAttention PReLU "
    "ReLU ReLU6 SELU SiLU Sigmoid Softmax Softplus Tanh",
    "torch.nn.modules.adaptive": "AdaptiveLogSoftmaxWithLoss",
    "torch.nn.modules.container": "ModuleDict ModuleList ParameterDict ParameterList Sequential",
    "torch.nn.modules.conv": "Conv1d",
    "torch.nn.modules.dropout": "AlphaDropout Dropout Dropout2d",
    "torch.nn.modules.linear": "Bilinear Identity Linear",
    "torch.nn.modules.loss": "CrossEntropyLoss NLLLoss",
    "torch.nn.modules.normalization": "GroupNorm LayerNorm RMSNorm",
    "torch.nn.modules.sparse": "Embedding EmbeddingBag",
    "torch.nn.backends.thnn": "_get_thnn_function_backend",
    "torch.nn.parameter": "Parameter",
    "torch": "Tensor bfloat16 bool device float16 float32 float64 int16 int32 int64 int8 strided uint8 "
    "ComplexDoubleStorage ComplexFloatStorage QInt32Storage QInt8Storage QUInt8Storage",
    "apex.fp16_utils.loss_scaler deepspeed.pt.loss_scaler deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler "
    "LossScaler",
    "argparse": "Namespace",
    "builtins": "bool dict float int list long str tuple unicode",
    "typing": "Any",
    "pathlib": "Path PosixPath WindowsPath",
    "data_utils": "Corpus LMOrderedIterator LMShuffledIterator",
    "utils.vocabulary": "OpenAIVocab Vocab",
    "vocabulary": "Vocab",
    "pytorch_transformers.tokenization_gpt2": "GPT2Tokenizer",
    "_regex regex._regex": "compile",
    "fastai.text.models.transformer": "Activation TransformerXL init_transformer",
    "omegaconf.base": "ContainerMetadata Metadata UnionNode",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode PathNode StringNode",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric numpy._core.numeric": "_frombuffer",
}
STUBS = frozenset(
    f"{module}.{name}" for modules, names in _STUB_NAMES.items() for module in modules.split() for name in names.split()
)

# Arrays have a state that is no dictionary: `plain_data` makes something of it.
OPAQUE = frozenset(name for name in STUBS if name.startswith("numpy."))

SCRIPTED = "__torch__."
"""Where the classes of a TorchScript archive lie, whose code is in the archive."""

# Of their objects only the content is kept: the rest says where each stands, and leads back to what it stands in.
CONFIGS = frozenset(name for name in STUBS if name.startswith("omegaconf."))


def shown(name: str) -> str:
    """A name from a file, fit for one line of a message."""
    text = name if name.isascii() and name.isprintable() else ascii(name)
    return text if len(text) <= 120 else f"{text[:120]}…"


def checked_key(key: Any, entries: dict[Any, Any], budget: Budget) -> Any:
    """A key for a dictionary with these entries, refused where hashing it could take long or recurse."""
    scalars = (str, int, float, bool, bytes, type(None))
    if type(key) is tuple:
        budget.charge(len(key))
        allowed = all(type(part) in scalars for part in key)
    else:
        allowed = type(key) in scalars or isinstance(key, Stub)
    if not allowed:
        raise CheckpointError(f"a dictionary has a key of type {type(key).__name__}, expected text or a number")
    budget.charge_key(key, entries)
    return key


def _mapping(args: tuple[Any, ...], budget: Budget) -> dict[Any, Any]:
    """OrderedDict(), OrderedDict(pairs), Counter(mapping): a dict, which keeps order as well."""
    if not args:
        return {}
    (items,) = args
    if type(items) is dict:
        budget.charge(len(items))
        return dict(items)
    if type(items) is list:
        budget.charge(len(items))
        if all(type(pair) in (list, tuple) and len(pair) == 2 for pair in items):
            made: dict[Any, Any] = {}
            for key, value in items:
                made[checked_key(key, made, budget)] = value
            return made
    raise CheckpointError("a mapping is not made of pairs; the file is damaged")


def _sequence(args: tuple[Any, ...], budget: Budget) -> list[Any]:
    """set(list), frozenset(list): a list."""
    (items,) = args or ([],)
    if type(items) not in (list, tuple):
        raise CheckpointError("a set is not made of a list; the file is damaged")
    budget.charge(len(items))
    return list(items)


def _size(args: tuple[Any, ...], budget: Budget) -> tuple[int, ...]:
    (sizes,) = args
    return integers(sizes, "a shape")


def _encode(args: tuple[Any, ...], budget: Budget) -> bytes:
    """How protocol 2 writes bytes."""
    text, encoding = args
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise CheckpointError(f"bytes are written as {type(text).__name__} in an encoding other than latin1")
    budget.charge(len(text) // TEXT)
    return text.encode("latin-1")


def _no_bytes(args: tuple[Any, ...], budget: Budget) -> bytes:
    """How protocol 2 writes no bytes at all."""
    if args:
        raise CheckpointError("bytes are made of something; the file is damaged")
    return b""


def integers(values: Any, what: str) -> tuple[int, ...]:
    """Numbers ≥ 0 that torch can take; anything else is refused."""
    numbers = type(values) in (tuple, list) and (
        len(values) > DIMENSION_LIMIT or all(type(n) is int and 0 <= n < 1 << 62 for n in values)
    )
    if not numbers:
        raise CheckpointError(f"{what} of a tensor is not a tuple of numbers ≥ 0; the file is damaged")
    if len(values) > DIMENSION_LIMIT:
        raise CheckpointError(f"{what} of a tensor has {len(values)} numbers, expected at most {DIMENSION_LIMIT}")
    return tuple(values)


def _tensor(args: tuple[Any, ...], budget: Budget) -> Tensor:
    """A tensor as (storage, offset, size, stride[, requires_grad, hooks[, metadata]]), inside its storage."""
    if len(args) not in (4, 6, 7) or not isinstance(args[0], Storage):
        raise CheckpointError("a tensor is not described by storage, offset, size and stride; the file is damaged")
    if len(args) == 7 and args[6]:
        raise CheckpointError(
            "a tensor is a conjugate or negated view; save it again with resolve_conj()/resolve_neg()"
        )
    storage: Storage = args[0]
    (offset,) = integers((args[1],), "the offset")
    size, stride = integers(args[2], "the shape"), integers(args[3], "the stride")
    if len(size) != len(stride):
        raise CheckpointError(f"a tensor has {len(size)} sizes and {len(stride)} strides; the file is damaged")
    elements, count, last = storage.elements.numel(), 1, offset
    for n, step in zip(size, stride, strict=True):
        count, last = count * n, last + (n - 1) * step
    # The count matters as well: a stride of 0 would let a few bytes stand for any number of elements.
    if offset > elements or count > elements or (count and last >= elements) or max(size, default=0) > 1 << 40:
        raise CheckpointError(
            f"a tensor of {shown(str(size))} with stride {shown(str(stride))} at {offset} does not fit into its "
            f"storage of {elements} elements; the file is damaged, or was saved without contiguous()"
        )
    place = (offset, size, stride)
    if place not in storage.views:
        budget.charge(OBJECT + count * storage.elements.element_size() // VIEW)
        # as_strided counts from the beginning of the memory, not of the part of it that `elements` may be.
        first = storage.elements.storage_offset()
        storage.views[place] = storage.elements.as_strided(size, stride, first + offset)
    return storage.views[place]


def _parameter(args: tuple[Any, ...], budget: Budget) -> Tensor:
    """A parameter: its tensor itself, so that tied parameters stay one object."""
    if len(args) not in (3, 4) or not isinstance(args[0], Tensor):
        raise CheckpointError("a parameter is not made of a tensor; the file is damaged")
    return args[0]


def _typed_tensor(args: tuple[Any, ...], budget: Budget) -> Any:
    """A tensor with attributes of its own, as (function, type, arguments, state): type and state are dropped."""
    function, _, arguments, _ = args
    rebuild = isinstance(function, Name) and function.class_name == "torch._utils._rebuild_tensor_v2"
    if not rebuild or type(arguments) is not tuple:
        raise CheckpointError("a tensor is of a kind that is not read here; save plain tensors")
    return _tensor(arguments, budget)


def _number(args: tuple[Any, ...], budget: Budget) -> float:
    """ruamel.yaml's number, which also knows how it was written; where, the pickle sets afterwards."""
    if len(args) != 1 or type(args[0]) is not float:
        raise CheckpointError("a number of a config is none; the file is damaged")
    return args[0]


def _same(args: tuple[Any, ...], budget: Budget) -> Any:
    """A list or a dictionary of TorchScript, beside which its type may stand."""
    if len(args) not in (1, 2) or type(args[0]) not in (list, dict):
        raise CheckpointError("a list of TorchScript is not made of a list; the file is damaged")
    return args[0]


def _quantised(args: tuple[Any, ...], budget: Budget) -> Any:
    raise CheckpointError("a tensor is quantised, expected plain tensors; save the weights before they are quantised")


def _nested_file(args: tuple[Any, ...], budget: Budget) -> Any:
    raise CheckpointError("a tensor was saved by pickle, not by torch.save; save the file again with torch.save")


NESTED = "torch.storage._load_from_bytes"
"""What a pickle that torch.save did not write calls for each storage, with a whole file by torch.save."""

# All that a program may call. None of these is the function of that name: each only makes plain data.
FUNCTIONS: dict[str, Callable[[tuple[Any, ...], Budget], Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda args, budget: {},
    "ruamel.yaml.comments.CommentedMap": _mapping,
    "ruamel.yaml.comments.CommentedSeq": _sequence,
    "ruamel.yaml.scalarfloat.ScalarFloat": _number,
    "builtins.set": _sequence,
    "builtins.frozenset": _sequence,
    "torch.Size": _size,
    "_codecs.encode": _encode,
    "builtins.bytes": _no_bytes,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
    "torch.jit._pickle.build_boollist": _same,
    "torch.jit._pickle.build_doublelist": _same,
    "torch.jit._pickle.build_intlist": _same,
    "torch.jit._pickle.build_tensorlist": _same,
    "torch.jit._pickle.restore_type_tag": _same,
    NESTED: _nested_file,
}

KNOWN = STUBS | FUNCTIONS.keys() | STORAGE_TYPES.keys()
