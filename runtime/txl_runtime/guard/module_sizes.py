"""Rules for the sizes of what "step" programs may hold beside (`plain_sizes`): modules of all sorts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from txl_runtime.guard.plain_sizes import products, reduced
from txl_runtime.guard.protobuf import RefusedError
from txl_runtime.guard.values import SLOW, SMALL, Dims, Node, Value, place, rule, sized, sizes_in, wider


@rule
def _arg(node: Node) -> Value:
    dims = node.value(0).dims
    return reduced(node, dims, [node.axis(len(dims))], bool(node.attributes.get("keepdims", 1)))


def _window(node: Node, kernel: Sequence[int]) -> tuple[Value, list[int], bool]:
    """Sizes behind a window that moves over all axes but the first two, and whether they are exact."""
    x = node.value(0)
    spatial, padding = x.dims[2:], node.attributes.get("auto_pad", b"NOTSET")
    many = len(spatial)
    strides = node.attributes.get("strides") or [1] * many
    gaps = node.attributes.get("dilations") or [1] * many
    pads = (node.attributes.get("pads") or [0] * 2 * many) if padding == b"NOTSET" else [0] * 2 * many
    more = node.attributes.get("output_padding") or [0] * many
    if not 0 < many == len(kernel) == len(strides) == len(gaps) == len(more) == len(pads) // 2 or min(
        *strides, *gaps, *(n + 1 for n in (*kernel, *pads, *more)), 1
    ) < 1:  # fmt: skip
        raise RefusedError("windows, strides or pads of other sizes than the value", "some for each axis")
    sizes = []
    for i, n in enumerate(spatial):
        reach, pad = gaps[i] * (kernel[i] - 1) + 1, pads[i] + pads[many + i]
        if node.op == "ConvTranspose":
            same_size = padding.startswith(b"SAME")
            sizes.append(n * strides[i] if same_size else strides[i] * (n - 1) + more[i] + reach - pad)
        elif padding.startswith(b"SAME"):
            sizes.append(-(-n // strides[i]))
        else:
            rounded = strides[i] - 1 if node.attributes.get("ceil_mode", 0) else 0
            room = n + pad - reach + rounded  # what is less than 0 is rounded towards it
            sizes.append((room // strides[i] if room >= 0 else -(-room // strides[i])) + 1)
    exact = not node.attributes.get("ceil_mode", 0) and (node.op != "ConvTranspose" or padding == b"NOTSET")
    if int(node.attributes.get("group", 1)) < 1:
        raise RefusedError("no groups", "1 or more")
    return x, [max(n, 0) for n in sizes], exact


def _kernel(node: Node) -> Dims:
    """Sizes of a convolution's weights, which have to be exact: behind a larger window is less."""
    if not node.value(1).exact:
        raise RefusedError("weights whose sizes are open", "fixed ones")
    return node.value(1).dims


@rule
def _conv(node: Node) -> Value:
    w = _kernel(node)
    x, sizes, exact = _window(node, w[2:])
    result = node.like([*x.dims[:1], *w[:1], *sizes], exact=exact)
    node.work, node.memory = result.most * math.prod(w[1:]), math.prod([*w[1:], *sizes])
    return result


@rule
def _conv_transpose(node: Node) -> Value:
    w = _kernel(node)
    x, sizes, exact = _window(node, w[2:])
    if len(x.dims) == 5 and not (x.exact and all(x.dims[2:])):  # ONNX Runtime reads before an array that is empty there
        raise RefusedError("a transposed convolution over three axes that may be empty", "three of known sizes")
    node.work, node.memory = x.most * math.prod(w[1:]), math.prod([*w[1:], *x.dims[2:]])
    dims = [*x.dims[:1], *(n * int(node.attributes.get("group", 1)) for n in w[1:2]), *sizes]
    return node.like(dims, exact=exact)


@rule
def _pool(node: Node) -> Value:
    kernel = node.attributes.get("kernel_shape") or []
    x, sizes, exact = _window(node, kernel)
    if node.attributes.get("auto_pad", b"").startswith(b"SAME"):  # which dilations make less
        exact = exact and max(node.attributes.get("dilations") or [1]) == 1
    result = node.like([*x.dims[:2], *sizes], exact=exact)
    node.work = 4 * result.most * math.prod(kernel)
    return result


@rule
def _global_pool(node: Node) -> Value:
    dims = node.value(0).dims
    return node.like([*dims[:2], *(1 for _ in dims[2:])])


@rule
def _recurrent(node: Node) -> list[Value]:
    x, w, r = (node.value(i) for i in range(3))
    if (len(x.dims), len(w.dims), len(r.dims)) != (3, 3, 3):
        raise RefusedError("a recurrent network of other than three axes", "three")
    ways, rows, hidden = r.dims
    gates = rows // max(hidden, 1)
    least = x.dims[2] if x.exact else 0  # else it is the most that there may be; engines compare what there is
    if not 1 <= gates * hidden == rows or w.dims[:2] != (ways, rows) or not least <= w.dims[2] <= x.dims[2]:
        raise RefusedError("weights of a recurrent network that do not fit each other", "those of one network")
    steps, batch, _ = x.dims
    sizes = [(steps, ways, batch, hidden), (ways, batch, hidden), (ways, batch, hidden)]
    node.work = steps * batch * (w.most + r.most + SLOW * ways * hidden * gates)
    # All gates of all steps are kept, and what it returns, whether or not somebody asks for that; half of it twice.
    node.memory = 2 * x.most + steps * batch * ways * hidden * (gates + 4)
    return [node.like(dims) for dims in sizes[: node.results]]


@rule
def _constant(node: Node) -> Value:
    (name, given), *others = node.attributes.items() or [("", None)]
    if others or given is None:
        raise RefusedError("a constant of several values or none", "one")
    if isinstance(given, Value):
        return given
    numbers = given if isinstance(given, list) else [given]
    whole = name.startswith("value_int") and len(numbers) <= SMALL
    return sized(
        [len(numbers)] if isinstance(given, list) else [], True, tuple((n, n) for n in numbers) if whole else None
    )


@rule
def _depth_to_space(node: Node) -> Value:
    x, block = node.value(0), int(node.attributes.get("blocksize", 0))
    if len(x.dims) != 4 or not 1 <= block <= max(x.dims):  # the square of a larger one ends the engine's process
        raise RefusedError("blocks of a value without four axes, or of no size", "four axes, and blocks within them")
    n, c, h, w = x.dims
    if node.op == "DepthToSpace":
        return node.like([n, c // block**2, h * block, w * block])
    return node.like([n, c * block**2, h // block, w // block])


@rule
def _einsum(node: Node) -> Value:
    equation = node.attributes.get("equation", b"").decode("ascii", "replace").replace(" ", "")
    if not re.fullmatch(r"[A-Za-z.,]+(->[A-Za-z.]*)?", equation):
        raise RefusedError("an equation that is none", "letters for axes")
    sides = equation.split("->")
    terms, sizes, rest, unnamed = sides[0].split(","), dict[str, int](), Dims(), set[int]()
    if len(terms) != len(node.inputs):
        raise RefusedError(f"an equation of {len(terms)} values for {len(node.inputs)}", "as many")
    for i, term in enumerate(terms):
        before, dots, behind = term.partition("...")
        dims = node.value(i).dims
        more = len(dims) - len(before) - len(behind)
        if more < 0 or (more and not dots) or "." in before + behind:
            raise RefusedError("an equation of other axes than its values", "the same")
        unnamed |= {more} if dots else set()
        rest = wider(rest, dims[len(before) : len(before) + more])
        for letter, n in zip(before + behind, dims[: len(before)] + dims[len(before) + more :], strict=True):
            sizes[letter] = max(n, sizes.get(letter, 0))
    if len(unnamed) > 1 or (unnamed and node.loose):  # may end the engine's process
        raise RefusedError("an equation whose dots are of several numbers of axes", "of one")
    if not all(node.value(i).most for i in range(len(terms))):  # likewise
        raise RefusedError("an equation of a value without numbers", "some numbers")
    letters = "".join(terms)
    result = sides[1] if len(sides) > 1 else "..." + "".join(sorted(c for c in sizes if letters.count(c) == 1))
    before, _, behind = result.partition("...")
    if not {*before, *behind} <= {*sizes}:
        raise RefusedError("an equation that returns axes it has not", "some of its own")
    node.work = math.prod(sizes.values()) * math.prod(rest)
    kept = [*(sizes[c] for c in before), *(rest if "..." in result else ()), *(sizes[c] for c in behind)]
    if len(terms) > 2:  # pairs are multiplied one after the other
        node.memory = node.work
    products(node, math.prod(n for c, n in sizes.items() if letters.count(c) > 1 and c in result) * math.prod(rest))
    node.memory += sum(node.value(i).most for i in range(len(terms))) + math.prod(kept)
    return node.like(kept)


@rule
def _flatten(node: Node) -> Value:
    dims = node.value(0).dims
    axis = int(node.attributes.get("axis", 1))
    axis += len(dims) if axis < 0 else 0
    return node.like([math.prod(dims[:axis]), math.prod(dims[axis:])], most=node.value(0).most)


@rule
def _gather_nd(node: Node) -> Value:
    data, index, batch = node.value(0).dims, node.value(1), int(node.attributes.get("batch_dims", 0))
    if not index.dims or not index.exact or not 0 <= batch + index.dims[-1] <= len(data):
        raise RefusedError("indices of more axes than the value, or of an open number", "those of the value")
    node.memory = 2 * index.most
    return node.like([*index.dims[:-1], *data[batch + index.dims[-1] :]])


@rule
def _grid_sample(node: Node) -> Value:
    result = node.like([*node.value(0).dims[:2], *node.value(1).dims[1:-1]])
    node.work = 16 * SLOW * result.most
    return result


@rule
def _nonzero(node: Node) -> Value:
    x = node.value(0)
    node.memory = 2 * max(len(x.dims), 1) * x.most  # counted twice over before it is returned
    return node.like([max(len(x.dims), 1), x.most], exact=False)


@rule
def _one_hot(node: Node) -> Value:
    dims, (depth, exact) = node.value(0).dims, sizes_in(node, 1)
    if len(depth) != 1 or node.value(2).dims != (2,):
        raise RefusedError("a depth that is no single number, or other than two values", "one depth, two values")
    axis = node.axis(len(dims) + 1, -1)
    return node.like([*dims[:axis], *depth, *dims[axis:]], exact=exact)


@rule
def _pad(node: Node) -> Value:
    dims, ((pads, exact), axes) = list(node.value(0).dims), (sizes_in(node, 1), node.numbers(3))
    places = [place(axis, len(dims)) for axis in (range(len(dims)) if axes is None else axes)]
    if len(pads) != 2 * len(places):
        raise RefusedError(f"{len(pads)} pads for {len(places)} axes", "two for each")
    for i, axis in enumerate(places):
        dims[axis] = max(dims[axis] + pads[i] + pads[len(places) + i], 0)
    return node.like(dims, exact=exact)


@rule
def _size(node: Node) -> Value:
    x = node.value(0)
    most = min(x.most, math.prod(x.dims))
    return sized([], True, ((most if node.exact else 0, most),))


@rule
def _tile(node: Node) -> Value:
    dims, (times, exact) = node.value(0).dims, sizes_in(node, 1)
    if len(times) != len(dims):
        raise RefusedError("repetitions of other axes than the value", "one for each")
    return node.like([n * k for n, k in zip(dims, times, strict=True)], exact=exact)


@rule
def _resize(node: Node) -> Value:
    x, scales = node.value(0), node.inputs[2] if len(node.inputs) > 2 else None
    roi = node.inputs[1] if len(node.inputs) > 1 else None
    if roi is not None and roi.most:
        raise RefusedError("a part of a value that is resized", "all of it")
    if scales is not None and scales.most:
        if len(scales.scales) != len(x.dims) or not all(0 < scale < 2**16 for scale in scales.scales):
            raise RefusedError("scales that are no constants above 0, one for each axis", "such constants")
        products = [n * scale for n, scale in zip(x.dims, scales.scales, strict=True)]
        exact = all(product.is_integer() and product < 2**24 for product in products)
        dims = [int(product) + (not exact) for product in products]
    else:
        dims, exact = sizes_in(node, 3)
        if len(dims) != len(x.dims):
            raise RefusedError(f"{len(dims)} sizes for {len(x.dims)} axes", "one for each")
    result = node.like(dims, exact=exact)
    slow = int(node.attributes.get("mode") == b"cubic" or node.attributes.get("antialias", 0))
    node.memory, node.work = 3 * slow * result.most, (16 if slow else 2) * SLOW * (x.most + result.most)
    return result


@rule
def _col2im(node: Node) -> Value:
    x, (image, exact), block = node.value(0), sizes_in(node, 1), node.numbers(2) or []
    if len(x.dims) != 3 or min(block, default=0) < 1 or len(image) != len(block):
        raise RefusedError("blocks of other axes than the image, or of no size", "one size for each axis of the image")
    return node.like([x.dims[0], x.dims[1] // math.prod(block), *image], exact=exact)
