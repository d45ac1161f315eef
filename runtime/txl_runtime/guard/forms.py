"""The operators and attributes that a graph may have: a closed list, and how large what an operator returns can be.

All of them compute the same from the same every time, end, and do nothing else: no loops, branches, sequences, text,
random numbers or files. What neither PyTorch's exporters nor our own passes write stands here only where it costs what
its values do. The first word of a line is the rule of `plain_sizes` by which sizes follow; behind an operator stand its
attributes, each with its type (b is 0 or 1, i a whole number of 32 bits, f a number, s text, t a tensor; a capital says
that there are several).
"""

from __future__ import annotations

import re

OPSETS, IR_VERSIONS, MICROSOFT = range(18, 25), range(8, 13), "com.microsoft"
"""Versions of the standard and of its files; the domain of ONNX Runtime's own operators, of version 1."""

_STANDARD = """
broadcast Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift(direction:s) BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
broadcast Ceil Celu(alpha:f) Clip Cos Cosh Div Elu(alpha:f) Equal Erf Exp Floor Gelu(approximate:s) Greater
broadcast GreaterOrEqual HardSigmoid(alpha:f beta:f) HardSwish IsInf(detect_negative:b detect_positive:b) IsNaN
broadcast LeakyRelu(alpha:f) Less LessOrEqual Log Max Mean Min Mish Mod(fmod:b) Mul Neg Not Or PRelu Pow Reciprocal Relu
broadcast Round Selu(alpha:f gamma:f) Shrink(bias:f lambd:f) Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum
broadcast Swish(alpha:f) Tan Tanh ThresholdedRelu(alpha:f) Where Xor
same BatchNormalization(epsilon:f momentum:f training_mode:b) Cast(to:i saturate:b round_mode:s) CastLike(saturate:b)
same CumSum(exclusive:b reverse:b) EyeLike(dtype:i k:i) Identity InstanceNormalization(epsilon:f)
same GroupNormalization(epsilon:f num_groups:i stash_type:i) LayerNormalization(axis:i epsilon:f stash_type:i)
same LogSoftmax(axis:i) RMSNormalization(axis:i epsilon:f stash_type:i) Softmax(axis:i) Trilu(upper:b)
same ScatterElements(axis:i reduction:s) ScatterND(reduction:s) TensorScatter(axis:i mode:s)
quantised DequantizeLinear(axis:i) QuantizeLinear(axis:i saturate:b)
reduce ReduceL1(keepdims:b noop_with_empty_axes:b) ReduceL2(keepdims:b noop_with_empty_axes:b)
reduce ReduceLogSum(keepdims:b noop_with_empty_axes:b) ReduceLogSumExp(keepdims:b noop_with_empty_axes:b)
reduce ReduceMax(keepdims:b noop_with_empty_axes:b) ReduceMean(keepdims:b noop_with_empty_axes:b)
reduce ReduceMin(keepdims:b noop_with_empty_axes:b) ReduceProd(keepdims:b noop_with_empty_axes:b)
reduce ReduceSum(keepdims:b noop_with_empty_axes:b) ReduceSumSquare(keepdims:b noop_with_empty_axes:b)
arg ArgMax(axis:i keepdims:b select_last_index:b) ArgMin(axis:i keepdims:b select_last_index:b)
conv Conv(auto_pad:s dilations:I group:i kernel_shape:I pads:I strides:I)
conv_transpose ConvTranspose(auto_pad:s dilations:I group:i kernel_shape:I output_padding:I pads:I strides:I)
pool AveragePool(auto_pad:s ceil_mode:b count_include_pad:b dilations:I kernel_shape:I pads:I strides:I)
pool MaxPool(auto_pad:s ceil_mode:b dilations:I kernel_shape:I pads:I storage_order:b strides:I)
global_pool GlobalAveragePool GlobalMaxPool
recurrent GRU(clip:f direction:s hidden_size:i layout:b linear_before_reset:b) RNN(clip:f direction:s hidden_size:i)
recurrent LSTM(clip:f direction:s hidden_size:i input_forget:b layout:b)
concat Concat(axis:i)
constant Constant(value:t value_float:f value_floats:F value_int:i value_ints:I)
constant_of_shape ConstantOfShape(value:t)
col2im Col2Im(dilations:I pads:I strides:I)
depth_to_space DepthToSpace(blocksize:i mode:s) SpaceToDepth(blocksize:i)
einsum Einsum(equation:s)
expand Expand
flatten Flatten(axis:i)
gather Gather(axis:i)
gather_elements GatherElements(axis:i)
gather_nd GatherND(batch_dims:i)
gemm Gemm(alpha:f beta:f transA:b transB:b)
grid_sample GridSample(align_corners:b mode:s padding_mode:s)
matmul MatMul
nonzero NonZero
one_hot OneHot(axis:i)
pad Pad(mode:s)
range Range
reshape Reshape(allowzero:b)
resize Resize(antialias:b coordinate_transformation_mode:s cubic_coeff_a:f exclude_outside:b extrapolation_value:f \
  keep_aspect_ratio_policy:s mode:s nearest_mode:s)
shape Shape(end:i start:i)
size Size
slice Slice
split Split(axis:i num_outputs:i)
squeeze Squeeze
tile Tile
top_k TopK(axis:i largest:b sorted:b)
transpose Transpose(perm:I)
unsqueeze Unsqueeze
"""
_MICROSOFT = """
matmul_blocks MatMulNBits(K:i N:i accuracy_level:i bits:i block_size:i)
matmul MatMulIntegerToFloat
"""
_PLAIN = """
Abs Add And Cast Clip Concat ConstantOfShape Div Equal Erf Exp Expand Gather GatherElements Gelu Gemm Greater
GreaterOrEqual Identity LayerNormalization Less LessOrEqual LogSoftmax MatMul MatMulIntegerToFloat MatMulNBits Max Min
Mod Mul Neg Not Or Pow QuantizeLinear Range ReduceMax ReduceSum Relu Reshape Shape Sigmoid Slice Softmax Split Squeeze
Sub Tanh TensorScatter TopK Transpose Unsqueeze Where
"""
PLAIN = frozenset(_PLAIN.split())
"""What programs of any kind may have; "step" programs, which hold modules of all sorts, may have all others too."""


def _read(text: str) -> dict[str, tuple[str, dict[str, str]]]:
    found = {}
    for line in text.strip().splitlines():
        rule, _, operators = line.partition(" ")
        for name, attributes in re.findall(r"(\w+)(?:\(([^)]*)\))?", operators):
            found[name] = rule, dict(entry.split(":") for entry in attributes.split())
    return found


OPERATORS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {"": _read(_STANDARD), MICROSOFT: _read(_MICROSOFT)}
"""By domain and name: the rule for sizes, and the attributes with their types."""
