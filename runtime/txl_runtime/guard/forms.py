"""The forms that the operators of a graph may have: one table, which is data, and which every reader of bundles shares.

An operator passes in a form of this table and in no other. A form is here because PyTorch's exporter or a pass of ours
writes it, or because it was run by ONNX Runtime (`tests/runtime/guard/test_forms.py`). All operators compute the same
from the same every time, end, and do nothing else: no loops, branches, sequences, text, random numbers or files.
MatMulIntegerToFloat has no bias, because ONNX Runtime up to 1.25 reads behind the end of one that is too short. A
ConvInteger has the zero point of what comes in, and a MatMulInteger that of its weights, because ONNX Runtime 1.20 dies
of those that lack it.

A line of the table reads: inputs, operators; e.g. `xm>* Split(axis:i)`: a value, perhaps sizes, any number of results.
Of the inputs, x and n have to be there, ? and m may be missing, and a last x* is one or more. The numbers of n and m
decide sizes of results, so they may follow from shapes and constants alone, never from what a model is fed. Behind >
stands how many results there may be, where that is not one. Behind an operator stand its attributes, each with its
type: b is 0 or 1, i a whole number of 32 bits, f a number, s text, t a tensor; a capital says that there are several.
Behind ! the attribute has to be there; behind = stand the only values that it may have. An attribute that is not there
has the value that the standard gives it, which is one of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

OPSETS, IR_VERSIONS, MICROSOFT = range(18, 25), range(8, 13), "com.microsoft"
"""Versions of the standard and of its files; the domain of ONNX Runtime's own operators, of version 1."""
ANY = 2**10
"""Inputs or results of an operator that may have any number of them."""

_STANDARD = """
x Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu(alpha:f) Cos Cosh Elu(alpha:f) Erf Exp Floor
x Gelu(approximate:s=none|tanh) HardSigmoid(alpha:f beta:f) HardSwish IsNaN LeakyRelu(alpha:f) Log Mish
x IsInf(detect_negative:b detect_positive:b)
x Neg Not Reciprocal Relu Round Selu(alpha:f gamma:f) Shrink(bias:f lambd:f)
x Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish(alpha:f) Tan Tanh ThresholdedRelu(alpha:f)
xx Add And BitShift(direction:s!=LEFT|RIGHT) BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual
xx Less LessOrEqual Mod(fmod:b) Mul Or PRelu Pow Sub Xor
xxx Where
x* Max Mean Min Sum
x?? Clip
x Cast(to:i! saturate:b round_mode:s=up|down|nearest) EyeLike(dtype:i k:i) Identity
x LogSoftmax(axis:i) Softmax(axis:i)
x? Trilu(upper:b)
xx CastLike(saturate:b) CumSum(exclusive:b reverse:b) RMSNormalization(axis:i epsilon:f stash_type:i)
xxx GroupNormalization(epsilon:f num_groups:i! stash_type:i) InstanceNormalization(epsilon:f)
xxx ScatterElements(axis:i reduction:s=none|add|mul|max|min) ScatterND(reduction:s=none|add|mul|max|min)
xx? TensorScatter(axis:i mode:s=linear|circular)
xx?>3 LayerNormalization(axis:i epsilon:f stash_type:i)
xxxxx BatchNormalization(epsilon:f momentum:f training_mode:b=0)
xx? DequantizeLinear(axis:i) QuantizeLinear(axis:i saturate:b)
xm ReduceL1(keepdims:b noop_with_empty_axes:b) ReduceL2(keepdims:b noop_with_empty_axes:b)
xm ReduceLogSum(keepdims:b noop_with_empty_axes:b) ReduceLogSumExp(keepdims:b noop_with_empty_axes:b)
xm ReduceMax(keepdims:b noop_with_empty_axes:b) ReduceMean(keepdims:b noop_with_empty_axes:b)
xm ReduceMin(keepdims:b noop_with_empty_axes:b) ReduceProd(keepdims:b noop_with_empty_axes:b)
xm ReduceSum(keepdims:b noop_with_empty_axes:b) ReduceSumSquare(keepdims:b noop_with_empty_axes:b)
x ArgMax(axis:i keepdims:b select_last_index:b) ArgMin(axis:i keepdims:b select_last_index:b)
xx? Conv(auto_pad:s=NOTSET|SAME_UPPER|SAME_LOWER|VALID dilations:I group:i kernel_shape:I pads:I strides:I)
xx? ConvTranspose(auto_pad:s=NOTSET|SAME_UPPER|SAME_LOWER|VALID dilations:I group:i kernel_shape:I \
  output_padding:I pads:I strides:I)
xxx? ConvInteger(auto_pad:s=NOTSET|SAME_UPPER|SAME_LOWER|VALID dilations:I group:i kernel_shape:I pads:I strides:I)
xx?x MatMulInteger
x>3 DynamicQuantizeLinear
x AveragePool(auto_pad:s=NOTSET|SAME_UPPER|SAME_LOWER|VALID ceil_mode:b count_include_pad:b dilations:I \
  kernel_shape:I! pads:I strides:I)
x>2 MaxPool(auto_pad:s=NOTSET|SAME_UPPER|SAME_LOWER|VALID ceil_mode:b dilations:I kernel_shape:I! pads:I \
  storage_order:b strides:I)
x GlobalAveragePool GlobalMaxPool
xxx?m?>2 GRU(clip:f direction:s=forward|reverse|bidirectional hidden_size:i layout:b=0 linear_before_reset:b)
xxx?m?>2 RNN(clip:f direction:s=forward|reverse|bidirectional hidden_size:i)
xxx?m???>3 LSTM(clip:f direction:s=forward|reverse|bidirectional hidden_size:i input_forget:b layout:b=0)
x* Concat(axis:i!)
- Constant(value:t value_float:f value_floats:F value_int:i value_ints:I)
n ConstantOfShape(value:t)
xnn Col2Im(dilations:I pads:I strides:I)
x DepthToSpace(blocksize:i! mode:s=DCR|CRD) SpaceToDepth(blocksize:i!)
x* Einsum(equation:s!)
xn Expand
x Flatten(axis:i)
xx Gather(axis:i)
xx GatherElements(axis:i)
xx GatherND(batch_dims:i)
xx? Gemm(alpha:f beta:f transA:b transB:b)
xx GridSample(align_corners:b mode:s=linear|nearest|cubic|bilinear|bicubic \
  padding_mode:s=zeros|border|reflection)
xx MatMul
x NonZero
xnx OneHot(axis:i)
xn?m Pad(mode:s=constant|reflect|edge)
nnn Range
xn Reshape(allowzero:b)
xmmm Resize(antialias:b coordinate_transformation_mode:s=half_pixel|asymmetric|align_corners|pytorch_half_pixel|\
half_pixel_symmetric cubic_coeff_a:f exclude_outside:b extrapolation_value:f keep_aspect_ratio_policy:s=stretch \
  mode:s=nearest|linear|cubic nearest_mode:s=round_prefer_floor|round_prefer_ceil|floor|ceil)
x Shape(end:i start:i)
x Size
xnnmm Slice
xm>* Split(axis:i num_outputs:i)
xm Squeeze
xn Tile
xn>2 TopK(axis:i largest:b sorted:b)
x Transpose(perm:I)
xn Unsqueeze
"""
_MICROSOFT = """
xxx? MatMulNBits(K:i! N:i! accuracy_level:i bits:i!=4|8 block_size:i!=16|32|64|128|256)
xxxx?? MatMulIntegerToFloat
"""
_PLAIN = """
Abs Add And Cast Clip Concat ConstantOfShape Div Equal Erf Exp Expand Gather GatherElements Gelu Gemm Greater
GreaterOrEqual Identity LayerNormalization Less LessOrEqual LogSoftmax MatMul MatMulIntegerToFloat MatMulNBits Max Min
Mod Mul Neg Not Or Pow QuantizeLinear Range ReduceMax ReduceSum Relu Reshape Shape Sigmoid Slice Softmax Split Squeeze
Sub Tanh TensorScatter TopK Transpose Unsqueeze Where
"""
PLAIN = frozenset(_PLAIN.split())
"""What programs of any kind may have; "step" programs, which hold modules of all sorts, may have all others too."""


class Form(Struct, frozen=True):
    """How an operator may stand in a graph.

    Attributes:
        sizes: the inputs whose numbers decide sizes, by their places.
        inputs: for each input whether it has to be there; where the last may be repeated, the others follow it.
        most_inputs: how many there may be.
        most_results: the same of results.
        attributes: the type of each attribute by its name, as in the table above.
        required: the attributes that have to be there.
        values: the only values of an attribute, by its name; an attribute that is not named here may have any.
    """

    sizes: tuple[int, ...]
    inputs: tuple[bool, ...]
    most_inputs: int
    most_results: int
    attributes: dict[str, str]
    required: tuple[str, ...]
    values: dict[str, tuple[str, ...]]

    def problem(self, inputs: Sequence[bool], results: int, attributes: Mapping[str, object]) -> tuple[str, str] | None:
        """What is not as in this form, and what it would be; None where all of it is.

        Args:
            inputs: of each input whether it is there.
            results: how many there are.
            attributes: the values of those that there are, by name; of text str or bytes.
        """
        needed = sum(self.inputs)
        if not needed <= len(inputs) <= self.most_inputs:
            most = "any number" if self.most_inputs == ANY else self.most_inputs
            return f"{len(inputs)} inputs", f"{needed} to {most}"
        wanted = (self.inputs[min(place, len(self.inputs) - 1)] for place in range(len(inputs)))
        for place, (there, required) in enumerate(zip(inputs, wanted, strict=True)):
            if not there and (required or place == len(inputs) - 1):
                return f"no input {place}", "one"
        if not 1 <= results <= self.most_results:
            return f"{results} results", f"at most {self.most_results}"
        if unknown := sorted(attributes.keys() - self.attributes.keys()):
            return f"the attribute {unknown[0][:60]!a}", "those that are its own"
        if missing := [name for name in self.required if name not in attributes]:
            return f"no attribute {missing[0]}", "one"
        for name in attributes.keys() & self.values.keys():
            value, allowed = attributes[name], self.values[name]
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
            if text not in allowed:
                return f"{text[:60]!a} as {name}", " or ".join(allowed)
        return None


def _read(text: str) -> dict[str, Form]:
    found = {}
    for line in text.strip().splitlines():
        sides, operators = line.split(" ", 1)
        inputs, _, results = sides.partition(">")
        kinds = inputs.strip("-*")
        sizes = tuple(place for place, kind in enumerate(kinds) if kind in "nm")
        needed = tuple(kind in "xn" for kind in kinds)
        most = ANY if inputs.endswith("*") else len(needed)
        for name, inside in re.findall(r"(\w+)(?:\(([^)]*)\))?", operators):
            entries = re.findall(r"(\w+):(\w)(!?)(?:=(\S+))?", inside)
            types = {key: kind for key, kind, _, _ in entries}
            required = tuple(key for key, _, mark, _ in entries if mark)
            values = {key: tuple(allowed.split("|")) for key, _, _, allowed in entries if allowed}
            returned = ANY if results == "*" else int(results or 1)
            found[name] = Form(sizes, needed, most, returned, types, required, values)
    return found


FORMS: dict[str, dict[str, Form]] = {"": _read(_STANDARD), MICROSOFT: _read(_MICROSOFT)}
"""The table by domain and name. It is plain data: `msgspec.json.encode(FORMS)` is what other languages are given."""
