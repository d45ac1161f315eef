"""What a pickle may refer to, and the stand-ins for it.

No name leads to the real class or function: an object is a `Stub`, a storage its elements, and `rebuilding` makes
dictionaries, lists and tensors of what calls the functions in its table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from txl_runtime.errors import CheckpointError


@dataclass(eq=False, repr=False)
class Stub:
    """An inert stand-in for an object of a class the file names.

    Attributes:
        class_name: the dotted name, as in the file or as an alias translated it.
        state: what the pickle would have put into __dict__; {} if nothing, or for a class or function itself.
        args: what the class or function was called with, e.g. the value of an enum's member.
        built: a state that is no dictionary of names, as NumPy's objects and some of TorchScript's have it.
    """

    class_name: str
    state: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    built: Any = None

    def __repr__(self) -> str:
        return f"Stub({self.class_name})"


class Name(Stub):
    """A class or function the file names, not an object made with it."""


_TYPES = "Double float64 Float float32 Half float16 BFloat16 bfloat16 Long int64 Int int32 Short int16 Char int8"
_KINDS = f"{_TYPES} Byte uint8 Bool bool".split()
STORAGE_TYPES: dict[str, torch.dtype] = {
    f"{module}.{kind}Storage": getattr(torch, name)
    for module in ("torch", "torch.cuda")
    for kind, name in zip(_KINDS[::2], _KINDS[1::2], strict=True)
}

_CLASSES = {
    "mem_transformer": "AdaptiveEmbedding DecoderLayer MemTransformerLM MultiHeadAttn PositionalEmbedding "
    "PositionwiseFF RelLearnableDecoderLayer RelLearnableMultiHeadAttn RelMultiHeadAttn "
    "RelPartialLearnableDecoderLayer RelPartialLearnableMultiHeadAttn",
    "proj_adaptive_softmax utils.proj_adaptive_softmax": "Projection ProjectedAdaptiveLogSoftmax",
    "data_parallel utils.data_parallel": "BalancedDataParallel",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.nn.parallel.distributed apex.parallel.distributed": "DistributedDataParallel",
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
}
STUBS = frozenset(
    f"{module}.{name}" for modules, names in _CLASSES.items() for module in modules.split() for name in names.split()
)
"""Classes whose objects mean what they do in the code that an importer knows, or nothing for a model."""
LIBRARIES = ("torch.nn.modules.", "omegaconf.", "numpy.")
"""Where all other classes of that kind lie."""

LONGEST = 4096
SCRIPTED = "__torch__."
"""Where the classes of a TorchScript archive lie, whose code is in the archive."""


def shown(name: str) -> str:
    """A name from a file, fit for one line of a message."""
    text = name if name.isascii() and name.isprintable() else ascii(name)
    return text if len(text) <= 120 else f"{text[:120]}…"


def joined(path: str, name: str) -> str:
    """The dotted name of a part of what has the name `path`, "" for the whole.

    Raises:
        CheckpointError: it is longer than any program has names, so a file may ask for many of that length.
    """
    dotted = f"{path}.{name}" if path else name
    if len(dotted) > LONGEST:
        raise CheckpointError(f"{shown(dotted)} has {len(dotted)} characters, expected a name of at most {LONGEST}")
    return dotted
