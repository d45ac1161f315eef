"""The forms that the operators of a graph may have, as one table of plain data that every reader of bundles shares.

An operator passes only in a form of this table. A form is listed if PyTorch's exporter or one of our passes writes it,
or if it was run in ONNX Runtime (`tests/runtime/guard/test_forms.py`). Every listed operator is deterministic, ends,
and does nothing but compute: no loops, branches, sequences, text, random numbers or files. MatMulIntegerToFloat has no
bias, because ONNX Runtime up to 1.25 reads beyond a bias that is too short. ConvInteger must have the zero point of its
input, and MatMulInteger the zero point of its weights, because ONNX Runtime 1.20 crashes without them.

A line of the table is: inputs, then operators with their attributes. E.g. `xm>* Split(axis:i)`: Split has one input,
perhaps a second one that gives sizes, any number of results, and the attribute axis, an integer.

Inputs: x and n are required, ? and m are optional, and * after the last x means one or more. The numbers in inputs n
and m decide the sizes of results, so they must follow from shapes and constants, never from the model's input data.
After > stands the maximum number of results, * for any; without >, there is one result.

Attributes: `name:type`, with the types b (0 or 1), i (32-bit integer), f (number), s (text) and t (tensor); a capital
letter is a list. ! after the type means required. After = stand the only allowed values, separated by |. An attribute
that a node lacks has the standard's default, which is one of the allowed values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

OPSETS, IR_VERSIONS, MICROSOFT = range(18, 25), range(8, 13), "com.microsoft"
"""Allowed versions of ONNX's operators and of its file format; the domain of ONNX Runtime's own operators."""
ANY = 2**10
"""Maximum number of inputs or results of an operator whose form allows any number."""

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
"""Operators that programs of every kind may have; programs "step", which hold modules of all kinds, may have all."""


class Form(Struct, frozen=True):
    """The inputs, results and attributes that an operator may have in a graph.

    Attributes:
        sizes: indices of the inputs whose numbers decide the sizes of results.
        inputs: for each input, whether it is required; further inputs, if allowed, are like the last input.
        most_inputs: maximum number of inputs.
        most_results: maximum number of results.
        attributes: type letter of each attribute, by name, as in the table above.
        required: names of the required attributes.
        values: allowed values of an attribute, by name; an attribute that is not listed may have any value.
    """

    sizes: tuple[int, ...]
    inputs: tuple[bool, ...]
    most_inputs: int
    most_results: int
    attributes: dict[str, str]
    required: tuple[str, ...]
    values: dict[str, tuple[str, ...]]

    def problem(self, inputs: Sequence[bool], results: int, attributes: Mapping[str, object]) -> tuple[str, str] | None:
        """Return (what the node has, what the form expects) for the first difference; None if nothing differs.

        E.g. ("7 inputs", "2 to 3"), or ("no input 1", "one").

        Args:
            inputs: for each input, whether the node has it.
            results: the node's number of results.
            attributes: values of the node's attributes, by name; text may be str or bytes.
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
    forms = {}
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
            forms[name] = Form(sizes, needed, most, returned, types, required, values)
    return forms


FORMS: dict[str, dict[str, Form]] = {"": _read(_STANDARD), MICROSOFT: _read(_MICROSOFT)}
"""The table as plain data, by domain and operator; readers in other languages get `msgspec.json.encode(FORMS)`."""
