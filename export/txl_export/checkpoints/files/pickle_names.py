"""Defines stand-ins for the classes and functions that a pickle names, and lists the names that importers know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

CODE = "__torch__."
"""Prefix of class names whose code a TorchScript archive holds."""


@dataclass(eq=False, repr=False)
class Stub:
    """An inert stand-in for an object: the class that the file names is never imported.

    Attributes:
        class_name: the dotted name in the file, or the alias's target.
        state: the attributes that the pickle sets, {} if it sets none.
        args: the arguments with which the pickle calls the class or function, e.g. the value of an enum's member.
        built: the pickled state if it is no dictionary of attributes, e.g. a NumPy array's tuple.
    """

    class_name: str
    state: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    built: Any = None


class Name(Stub):
    """A stand-in for a class or function that the pickle refers to, and not for an object made with it."""


_PAIRS = "Double float64 Float float32 Half float16 BFloat16 bfloat16 Long int64 Int int32 Short int16 Char int8"
_KINDS = f"{_PAIRS} Byte uint8 Bool bool".split()
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
    "torch.nn.parameter": "Parameter",
    "torch": "Size Tensor bfloat16 bool device float16 float32 float64 int16 int32 int64 int8 strided uint8 "
    "ComplexDoubleStorage ComplexFloatStorage QInt32Storage QInt8Storage QUInt8Storage",
    "torch.storage": "_load_from_bytes",
    "torch._tensor": "_rebuild_from_type_v2",
    "apex.fp16_utils.loss_scaler deepspeed.pt.loss_scaler deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler "
    "LossScaler",
    "argparse": "Namespace",
    "builtins": "bool bytes dict float frozenset int list long set str tuple unicode",
    "collections": "Counter OrderedDict defaultdict",
    "typing": "Any",
    "pathlib": "Path PosixPath WindowsPath",
    "data_utils": "Corpus LMOrderedIterator LMShuffledIterator",
    "utils.vocabulary vocabulary": "OpenAIVocab Vocab",
    "pytorch_transformers.tokenization_gpt2": "GPT2Tokenizer",
    "_regex regex._regex": "compile",
    "_codecs": "encode",
    "fastai.text.models.transformer": "Activation TransformerXL init_transformer",
}
CLASSES = STORAGE_TYPES.keys() | {
    f"{module}.{name}" for modules, names in _CLASSES.items() for module in modules.split() for name in names.split()
}
"""Dotted names that mean the same in all files; importers use that meaning, or a model does not depend on it."""
_BEGINNINGS = "torch._utils._rebuild_tensor torch._utils._rebuild_parameter torch.jit._pickle. torch.nn.modules. "
_BEGINNINGS += "torch.nn.backends. numpy. omegaconf. ruamel.yaml."


def known(name: str) -> bool:
    """Return whether importers know a name: it is in `CLASSES`, or begins like an entry of `_BEGINNINGS`."""
    return name in CLASSES or name.startswith(tuple(_BEGINNINGS.split()))


def shown(name: str) -> str:
    """Return a name from a file in printable ASCII, cut to 120 characters, for a message."""
    text = name if name.isascii() and name.isprintable() else ascii(name)
    return text if len(text) <= 120 else f"{text[:120]}…"
