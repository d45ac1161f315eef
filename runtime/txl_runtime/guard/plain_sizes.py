"""How large the values of a graph can be, found from the sizes of its inputs alone.

The sizes that a file declares are not believed: an engine holds them against what it can infer, but not where a size is
the content of another value, and old files declare none; and few nodes make much of little, because broadcasts,
products and repetitions multiply. So every operator has a rule here. Sizes are whole numbers, and upper bounds where a
graph leaves a size open. A size that is the content of another value has to follow from constants and sizes, so the
ranges of a small value's numbers are kept. The rules here are of the operators that any program may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from txl_runtime.guard.protobuf import RefusedError
from txl_runtime.guard.values import (
    FAR,
    ITEMS,
    SLOW,
    SMALL,
    Dims,
    Node,
    Ranges,
    Value,
    place,
    rule,
    sized,
    sizes_in,
    wider,
)
from txl_runtime.types import Array

PRODUCT, STARTING = 24, 512
"""What ONNX Runtime keeps of each of many products, in numbers of 4 bytes, and products that take as long to begin."""
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Min": min,
    "Max": max,
}


def _kept(found: Sequence[tuple[int, int]]) -> Ranges | None:
    """Numbers that no type wraps around."""
    return tuple(found) if all(-(2**31) <= low <= high < 2**31 for low, high in found) else None


@rule
def _broadcast(node: Node) -> Value:
    if node.op == "Clip":  # its limits are single numbers, and may be missing
        return Value(*node.value(0)[:3])
    values = [node.value(i) for i in range(len(node.inputs))]
    dims = wider(*[value.dims for value in values])
    divisors = values[1].content if len(values) == 2 and node.op in ("Div", "Mod") else None
    if any(low == high and low in (0, -1) for low, high in divisors or ()):  # may end the engine's process
        raise RefusedError("whole numbers that are divided by 0 or -1", "a number above 0")
    if node.op in ("Mish", "Swish", "HardSwish"):  # engines without them compute them in parts
        node.memory = 2 * math.prod(dims)
    if node.op == "Mod" and node.attributes.get("fmod", 0):
        node.work = 32 * SLOW * math.prod(dims)  # a division bit by bit
    if len(values) == 1:
        found = values[0].content
        kept: Ranges | None = None
        if found is not None and node.op in ("Neg", "Abs"):
            ends = [(-high, -low) if node.op == "Neg" or high < 0 else (low, high) for low, high in found]
            kept = _kept([(0, max(-low, high)) if node.op == "Abs" and low < 0 else (low, high) for low, high in ends])
        return Value(dims, node.exact, values[0].most, kept)
    if len(dims) > 1 or values[0].content is None or len(values) != 2 or values[1].content is None:
        return node.like(dims)
    return node.like(dims, _computed(node.op, values[0].content, values[1].content))


def _computed(op: str, left: Ranges, right: Ranges) -> Ranges | None:
    if len(left) != len(right) and 1 not in (len(left), len(right)):
        return None
    if not (left and right):
        return ()
    count, found = max(len(left), len(right)), []
    for (a, b), (c, d) in zip(left * (count // len(left)), right * (count // len(right)), strict=True):
        if op == "Div" and c > 0:  # towards zero or down, whatever the type
            ends = [a // c, a // d, -(-b // c), -(-b // d)]
        elif op in _ARITHMETIC:
            ends = [_ARITHMETIC[op](x, y) for x in (a, b) for y in (c, d)]
        else:
            return None
        found.append((min(ends), max(ends)))
    return _kept(found)


@rule
def _same(node: Node) -> Value | list[Value]:
    value, to = node.value(0), node.attributes.get("to", node.attributes.get("dtype", 1))
    if to not in ITEMS:
        raise RefusedError(f"the type {to}", "a number of 8 bits or more, or a truth value")
    kept = node.op == "Identity" or (node.op == "Cast" and to in (6, 7))
    result = Value(value.dims, value.exact, value.most, _kept(value.content) if kept and value.content else None)
    if node.op == "LayerNormalization":
        axis = node.axis(len(value.dims), -1)
        mean = node.like([*value.dims[:axis], *(1 for _ in value.dims[axis:])])
        return [result, mean, mean]
    if node.op in ("GroupNormalization", "RMSNormalization"):  # engines without them compute them in parts
        node.memory = 4 * value.most
    return [result]


@rule
def _quantised(node: Node) -> Value:
    x, scale = node.value(0), node.value(1)
    zero = node.value(2) if len(node.inputs) > 2 else scale
    one = scale.dims in ((), (1,)) or scale.dims == (x.dims[node.axis(len(x.dims), 1)],)
    if node.exact and not (one and zero.dims == scale.dims):
        raise RefusedError("scales or zero points of other sizes than an axis of the value", "one for each, or one")
    return Value(x.dims, x.exact, x.most)


def reduced(node: Node, dims: Dims, axes: Sequence[int], keep: bool) -> Value:
    """A value without some axes, or with one entry along them."""
    gone = {place(axis, len(dims)) for axis in axes}
    kept = [1 if i in gone else n for i, n in enumerate(dims) if keep or i not in gone]
    exact = node.exact and 0 not in dims
    if gone and not exact:  # ONNX Runtime may leave an empty value as it is
        if 0 in dims and not keep:
            raise RefusedError("axes that are dropped from a value without numbers", "some numbers")
        node.loose = not keep
        shift = len(dims) - len(kept)
        kept = [max(n, dims[i], dims[i + shift]) for i, n in enumerate(kept)]
    return node.like(kept, exact=exact)


@rule
def _reduce(node: Node) -> Value:
    dims, axes, keep = node.value(0).dims, node.numbers(1), bool(node.attributes.get("keepdims", 1))
    if not axes:
        axes = [] if node.attributes.get("noop_with_empty_axes", 0) else list(range(len(dims)))
    return reduced(node, dims, axes, keep)


@rule
def _concat(node: Node) -> Value:
    values = [node.value(i) for i in range(len(node.inputs))]
    axis = node.axis(len(values[0].dims))
    if any(len(value.dims) != len(values[0].dims) for value in values):
        raise RefusedError("values of different axes to join", "the same")
    dims = [max(sizes) for sizes in zip(*(value.dims for value in values), strict=True)]
    dims[axis:axis + 1] = [sum(value.dims[axis] for value in values)] if dims else []  # fmt: skip
    content: Ranges | None = None
    if len(dims) == 1 and dims[0] <= SMALL and all(value.content is not None for value in values):
        content = tuple(pair for value in values for pair in value.content or ())
    return node.like(dims, content)


@rule
def _constant_of_shape(node: Node) -> Value:
    given, exact = sizes_in(node, 0)
    value = node.attributes.get("value")
    one = value.content[0] if isinstance(value, Value) and value.content else None
    known = one is not None and exact and len(given) == 1 and given[0] <= SMALL
    return sized(given, exact, (one,) * given[0] if known and one is not None else None)


@rule
def _expand(node: Node) -> Value:
    given, exact = sizes_in(node, 1)
    if min(given, default=0) < 0:
        raise RefusedError(f"a size of {min(given)}", "0 or more")
    return node.like(wider(node.value(0).dims, tuple(given)), exact=exact)


@rule
def _gather(node: Node) -> Value:
    data, index = node.value(0), node.value(1)
    axis = node.axis(len(data.dims))
    content: Ranges | None = None
    if data.content is not None and index.content is not None and len(data.dims) == 1:
        if any(low != high or not -len(data.content) <= low < len(data.content) for low, high in index.content):
            content = None
        else:
            content = tuple(data.content[low] for low, _ in index.content)
    return node.like([*data.dims[:axis], *index.dims, *data.dims[axis + 1 :]], content)


@rule
def _gather_elements(node: Node) -> Value:
    return node.like(node.value(1).dims)


@rule
def _gemm(node: Node) -> Value:
    (a, b), (c, d) = (
        node.value(i).dims[:: -1 if node.attributes.get(f"trans{'AB'[i]}", 0) else 1]
        if len(node.value(i).dims) == 2 else (0, -1) for i in (0, 1)
    )  # fmt: skip
    result = node.like([a, d])
    node.work = result.most * max(b, c)
    return result


@rule
def _matmul(node: Node) -> Value:
    a, b = node.value(0).dims, node.value(1).dims
    if not a or not b:
        raise RefusedError("a product of a single number", "axes to sum over")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    dims = [*wider(a[:-2], b[:-2]), *rows, *columns]
    result = node.like(dims, exact=0 not in dims)  # ONNX Runtime does not broadcast what is empty
    if any(value and value.dims not in ((), (1,), columns) for value in node.inputs[2:]):
        raise RefusedError("scales or zero points of another number than columns", "one for each, or one")
    slow = node.value(0).item if node.value(0).item > 4 else 1  # engines are quick with floats of 4 bytes alone
    node.work = slow * result.most * max(a[-1], b[-2] if len(b) > 1 else b[0])
    products(node, math.prod(dims[: len(dims) - len(rows) - len(columns)]))
    return result


def products(node: Node, many: int) -> None:
    """Count what an engine keeps of each of many products of matrices, and what it takes to begin each."""
    if many > 1:
        node.memory, node.work = node.memory + PRODUCT * many, node.work + STARTING * many


@rule
def _matmul_blocks(node: Node) -> Value:
    """The forms that the exporter writes: other ones make ONNX Runtime read beyond what there is."""
    a, given = node.value(0), node.attributes
    inner, columns, bits, block = (int(given[name]) for name in ("K", "N", "bits", "block_size"))
    blocks = -(-inner // block)
    held = [(1, columns * blocks * (block * bits // 8)), (4, columns * blocks), (1, columns * -(-blocks * bits // 8))]
    found = [(value.item, value.most) for value in (node.value(i) for i in range(1, len(node.inputs)))]
    if min(inner, columns) < 1 or a.dims[-1:] != (inner,) or found != held[: len(found)] or not _whole(node):
        raise RefusedError(f"weights of {found} (bytes, numbers) for {inner} to {columns}", f"{held}, constants")
    result = node.like([*a.dims[:-1], columns])
    node.work, node.memory = result.most * inner, 2 * a.most
    return result


def _whole(node: Node) -> bool:
    """Whether all but the first input are constants of the file, whose types and sizes are known."""
    return all(value is not None and value.exact and value.fixed for value in node.inputs[1:])


@rule
def _range(node: Node) -> Value:
    (start, limit, step) = ((node.content(i) or ((0, 0),))[0] for i in range(3))
    if step[0] != step[1] or not step[0]:
        raise RefusedError("a range whose steps depend on a size, or are 0", "a constant")
    ends = (limit[1] - start[0], limit[0] - start[1])
    if max(map(abs, ends)) >= 2**31:  # ONNX Runtime up to 1.20 takes the difference in the numbers' type, which wraps
        raise RefusedError(f"a range over {max(map(abs, ends))}", "fewer numbers than 2^31")
    dims = [max(-(-span // step[0]), 0) for span in (ends if step[0] > 0 else ends[::-1])]
    return node.like(dims[:1], exact=dims[0] == dims[1])


def _picked(content: Ranges | None, dims: Sequence[int], move: Callable[[Array], Array]) -> Ranges | None:
    """Which of a value's known numbers are where after they have been moved."""
    if content is None or math.prod(dims) != len(content):
        return None
    return tuple(content[at] for at in move(np.arange(len(content)).reshape(dims)).ravel().tolist())


@rule
def _reshape(node: Node) -> Value:
    x, content = node.value(0), node.content(1) or ()
    dims, known, wild, exact = list[int](), 1, -1, True
    for i, (low, high) in enumerate(content):
        if (low, high) == (0, 0) and not node.attributes.get("allowzero", 0):
            low = high = x.dims[i] if i < len(x.dims) else 0
            low = low if x.exact else 1
        elif low <= 0 <= high and not node.attributes.get("allowzero", 0):  # 0 means the size that was there
            high = max(high, x.dims[i] if i < len(x.dims) else 0)
        if low < 0:
            if low != high or low != -1 or wild >= 0:
                raise RefusedError("sizes that may be negative", "one -1 at most")
            wild = i
        known *= max(low, 1) if i != wild else 1
        exact = exact and low == high
        dims.append(high)
    if wild >= 0:
        dims[wild] = min(x.most, math.prod(x.dims)) // known
    return node.like(dims, x.content, exact=exact, most=x.most)


@rule
def _shape(node: Node) -> Value:
    dims = node.value(0).dims
    if node.loose:
        raise RefusedError("the sizes of a value that may have dropped its axes or not", "axes that are kept")
    part = dims[slice(int(node.attributes.get("start", 0)), int(node.attributes.get("end", len(dims))))]
    return sized([len(part)], True, tuple((n if node.exact else 0, n) for n in part))


@rule
def _slice(node: Node) -> Value:
    x, rank = node.value(0), len(node.value(0).dims)
    starts, ends, steps = node.content(1) or (), node.content(2) or (), node.numbers(4)
    axes = node.numbers(3)
    places = [place(axis, rank) for axis in (range(len(starts)) if axes is None else axes)]
    if not len(starts) == len(ends) == len(places) == len(steps or starts) or len({*places}) != len(places):
        raise RefusedError("a slice of other axes than its value", "a start and an end for each")
    dims, exact, content = list(x.dims), True, x.content
    for i, axis in enumerate(places):
        n, step = x.dims[axis], 1 if steps is None else steps[i]
        if x.exact and starts[i][0] == starts[i][1] and ends[i][0] == ends[i][1] and step:
            least, most = (0, n) if step > 0 else (-1, n - 1)  # of an end; a start is within the value
            first, last = (at + n if at < 0 else at for at in (starts[i][0], ends[i][0]))
            first, last = min(max(first, 0), most), min(max(last, least), most)
            if step < 0 and ends[i][0] in (2**31 - 1, 2**63 - 1):  # to ONNX Runtime the end of the way, not the last
                last = least
            part = range(first, last, step) if n else range(0)
            dims[axis] = len(part)
            before = [*dims[:axis], n, *dims[axis + 1 :]]
            content = _picked(content, before, partial(np.take, indices=part, axis=axis))
        else:
            exact, content = False, None
            low, high = starts[i][0], ends[i][1]
            if step > 0 and low >= 0 and ends[i][0] >= 0:
                dims[axis] = max(min(n, high - low), 0)
            elif step > 0 and -FAR < low < 0 and low == starts[i][1]:
                dims[axis] = min(n, -low)
    return node.like(dims, content, exact=exact)


@rule
def _split(node: Node) -> list[Value]:
    dims, parts = node.value(0).dims, node.content(1)
    axis = node.axis(len(dims))
    if len({node.results, int(node.attributes.get("num_outputs", node.results))}) > 1:
        raise RefusedError(f"{node.attributes['num_outputs']} parts for {node.results} results", "as many")
    if not dims or (parts is not None and len(parts) != node.results):
        raise RefusedError("parts of another number than its results", "the same")
    if parts is None:
        each = -(-dims[axis] // node.results)
        sizes = [max(min(each, dims[axis] - i * each), 0) if node.exact else each for i in range(node.results)]
        return [node.like([*dims[:axis], n, *dims[axis + 1 :]]) for n in sizes]
    return [node.like([*dims[:axis], high, *dims[axis + 1 :]], exact=low == high) for low, high in parts]


@rule
def _squeeze(node: Node) -> Value:
    x, axes = node.value(0), node.numbers(1)
    if not axes and not x.exact:
        raise RefusedError("axes to drop that depend on sizes", "constants")
    gone = {place(axis, len(x.dims)) for axis in axes} if axes else {i for i, n in enumerate(x.dims) if n == 1}
    return node.like([n for i, n in enumerate(x.dims) if i not in gone], x.content)


@rule
def _top_k(node: Node) -> Value:
    dims, (most, exact) = list(node.value(0).dims), sizes_in(node, 1)
    axis = node.axis(len(dims), -1)
    node.memory, node.work = 2 * node.value(0).most, node.value(0).most * 4 * max(dims[axis], 1).bit_length()
    dims[axis] = most[0] if most else 0
    return node.like(dims, exact=exact)


@rule
def _transpose(node: Node) -> Value:
    x = node.value(0)
    order = node.attributes.get("perm", list(range(len(x.dims)))[::-1])
    if sorted(order) != list(range(len(x.dims))):
        raise RefusedError("an order of other axes than the value", "each once")
    content = _picked(x.content, x.dims, lambda at: at.transpose(order))
    return Value(tuple(x.dims[axis] for axis in order), x.exact, x.most, content)


@rule
def _unsqueeze(node: Node) -> Value:
    x, axes = node.value(0), node.numbers(1) or []
    rank = len(x.dims) + len(axes)
    new, old = {place(axis, rank) for axis in axes}, iter(x.dims)
    if len(new) != len(axes):
        raise RefusedError("an axis twice", "each once")
    return node.like([1 if i in new else next(old) for i in range(rank)], x.content, most=x.most)
