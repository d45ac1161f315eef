"""Rewrites opset 27's LinearAttention and CausalConvWithState with operators of opset 18.

LinearAttention keeps a matrix S [dk, dv] per head. Every position changes S and then reads it:

    S = exp(g) · S + k ⊗ u,    u = v  or  β · (v - exp(g) · Sᵀ k),    o = scale · Sᵀ q

Chunks of up to 64 positions are computed at once, with E[t, s] = exp(g[s+1] + … + g[t]) for s <= t, 0 for s > t, and
w[t] = exp(g[1] + … + g[t]):

    U = V  or  (I + β · below the diagonal (E · K Kᵀ))⁻¹ β · (V - w · K S),    O = (E · Q Kᵀ) U + w · Q S

Each decay is the exp of one sum, because a quotient of products would be 0 / 0 after a strong decay. If each key has
its own decay, as in GLA, E has one axis more, and chunks have 8 positions. If a head then has few values, as in Mamba
[16, 1], these sums are larger than the states, and the recurrence is written out for each position instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from txl_runtime.guard.graph_check import NODES

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import size_along
from txl_export.graphs.unsettled import UnsettledError

CHUNK, CHUNK_BY_KEY = 64, 8
"""Maximum number of positions of a chunk: 64 if a head has at most one decay, 8 if each key has its own decay."""
FEW_VALUES = 16
"""If each key has its own decay and a head has fewer values (dv) than this, the written-out recurrence is faster."""
MOST_NUMBERS = 2**26
"""Maximum number of values of the states of all positions in a graph: small malicious files may ask for gigabytes."""
_NO_MORE = -120.0
"""Least logarithm of a decay: exp(-120) is 0 in float32. So is exp(-inf), but -inf times 0 is NaN."""
_FLOAT = ir.DataType.FLOAT
_ROWS, _TURNED = (0, 2, 3, 1, 4), (0, 1, 2, 4, 3)


class Part(NamedTuple):
    """The inputs of a chunk of n positions; before `by_chunks` cuts them, positions are the second axis.

    Attributes:
        q: queries [B, heads, queries per head, n, dk].
        k, v: keys [B, heads, 1, n, dk] and values [B, heads, 1, n, dv].
        g: logarithms of decays [B, heads, 1, n, 1 or dk]; None without decay.
        b: β [B, heads or 1, 1, n, 1]; None without the delta rule.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    g: ir.Value | None
    b: ir.Value | None


def rewrite_convolution(graph: ir.Graph, node: ir.Node) -> None:
    """Rewrite CausalConvWithState as Concat or Pad, a depthwise Conv, a Slice, and SiLU if the node has an activation.

    The node is replaced in place; a node whose kernel has unknown sizes stays. With x [B, C, L] and a kernel
    [C, 1, 4], 3 positions stand before x: the state [B, C, 3], or zeros.
    """
    x, weight, bias, past = (*node.inputs, None, None)[:4]
    channels, width = size_along(weight, 0), size_along(weight, 2)
    if node.domain or x is None or channels is None or width is None:  # ONNX Runtime's node has other layouts
        return
    build = Builder(graph, "causal").at(node)
    if past is not None:
        x = build.op("Concat", [past, x], axis=2)
    elif width > 1:
        x = build.op("Pad", [x, build.numbers(0, 0, width - 1, 0, 0, 0)])
    result = build.op("Conv", [x, weight] if bias is None else [x, weight, bias], group=channels)
    if node.attributes.get_string("activation", "none") != "none":
        result = _cast(build, result, _FLOAT)  # the standard computes SiLU in float32 for float16, too
        result = build.op("Mul", [result, build.op("Sigmoid", [result])])
    build.replace(node.outputs[0], _cast(build, result, node.outputs[0].dtype))
    if len(node.outputs) > 1:
        bounds = [build.numbers(number) for number in (1 - width, 2**31 - 1, 2)]
        build.replace(node.outputs[1], build.op("Slice", [x, *bounds]))
    graph.remove(node, safe=True)


def rewrite_attention(graph: ir.Graph, node: ir.Node) -> None:
    """Rewrite LinearAttention, in place. A node with an unknown number of positions, keys, values or decays stays.

    Raises:
        UnsettledError: the graph would have more than `NODES` operators, or states of more than `MOST_NUMBERS` values
            for all positions.
    """
    query, key, value, past, decay, beta = (*node.inputs, None, None, None)[:6]
    length, queries, values = size_along(query, 1), size_along(query, 2), size_along(value, 2)
    rates = 0 if decay is None else size_along(decay, 2)
    if node.domain or query is None or key is None or value is None or None in (length, queries, values, rates):
        return
    assert length and queries and values and rates is not None  # noqa: PT018
    heads, q_heads = (node.attributes[f"{side}_num_heads"].as_int() for side in ("kv", "q"))
    keys, rates, values = queries // q_heads, rates // heads, values // heads
    alone = decay is not None and beta is None and rates > 1 and values < FEW_VALUES and length > 1
    size = 1 if alone else CHUNK_BY_KEY if rates > 1 else CHUNK
    if (most := 64 * -(-length // size) + len(graph)) > NODES:
        raise UnsettledError(
            f"it becomes the operator LinearAttention of {length} positions, which are up to {most} operators, "
            f"expected at most {NODES}; give a shorter segment"
        )
    if alone and (most := length * heads * keys * values) > MOST_NUMBERS:
        raise UnsettledError(
            f"it becomes the operator LinearAttention with {most} numbers of states for {length} positions, expected "
            f"at most {MOST_NUMBERS}; give a shorter segment"
        )
    build = Builder(graph, "linear").at(node)
    factor = node.attributes.get_float("scale", 0.0) or keys**-0.5

    def apart(given: ir.Value, *own: int) -> ir.Value:
        """Cast [B, L, numbers] to float32 and reshape it to [B, L, *own]."""
        return build.op("Reshape", [_cast(build, given, _FLOAT), build.numbers(0, 0, *own)])

    q = build.scaled(apart(query, heads, -1, keys), factor)
    k, v = apart(key, heads, 1, keys), apart(value, heads, 1, values)
    g = None if decay is None else apart(decay, heads, 1, rates)
    b = None if beta is None else apart(beta, -1, 1, 1)
    state = None if past is None else _cast(build, past, _FLOAT)
    if alone:
        result, state = _one_by_one(build, Part(q, k, v, g, b), state, length)
    else:
        result, state = by_chunks(build, Part(q, k, v, g, b), state, length, size, rates)
    build.replace(node.outputs[0], _cast(build, apart(result, -1), node.outputs[0].dtype))
    if len(node.outputs) > 1:
        build.replace(node.outputs[1], _cast(build, state, node.outputs[1].dtype))
    graph.remove(node, safe=True)


def by_chunks(
    build: Builder, whole: Part, state: ir.Value | None, length: int, size: int, rates: int
) -> tuple[ir.Value, ir.Value]:
    """Return the results [B, L, heads, queries per head, dv] and the last state [B, heads, dk, dv].

    Args:
        build: makes the nodes.
        whole: all L positions, as [B, L, heads, queries per head or 1, numbers].
        state: the state before the first position; None for zeros.
        length: the number of positions, L.
        size: maximum number of positions of a chunk.
        rates: number of decays per head: dk if each key has its own, 1 if all keys share one, 0 without decay.
    """
    chunks = [min(size, length - first) for first in range(0, length, size)]

    def cut(given: ir.Value | None) -> Sequence[ir.Value | None]:
        if given is None:
            return [None] * len(chunks)
        rows = build.transpose(given, _ROWS)
        return build.split(rows, chunks, 3) if len(chunks) > 1 else [rows]

    last = None if state is None else build.op("Unsqueeze", [state, build.numbers(2)])
    results = list[ir.Value]()
    for n, parts in zip(chunks, zip(*map(cut, whole), strict=True), strict=True):
        part = Part(*parts)
        result, last = _position(build, part, last) if n == 1 else _chunk(build, part, last, n, rates)
        results.append(result)
    assert last is not None
    result = build.transpose(build.concat(results, 3), (0, 3, 1, 2, 4))
    return result, build.op("Squeeze", [last, build.numbers(2)])


def _one_by_one(build: Builder, whole: Part, state: ir.Value | None, length: int) -> tuple[ir.Value, ir.Value]:
    """Write the recurrence out: a product and a sum for each position, then one product that reads all states.

    Arguments and results are those of `by_chunks`. States are [B, 1, heads, 1, dv, dk] in between: a sum over the last
    axis is 10 times as fast as many small products.
    """
    assert whole.g is not None
    new = build.op(
        "Mul", [build.op("Unsqueeze", [part, build.numbers(axis)]) for part, axis in ((whole.k, 4), (whole.v, 5))]
    )
    decays = build.op("Exp", [build.op("Unsqueeze", [whole.g, build.numbers(4)])])
    last = None if state is None else build.op("Unsqueeze", [build.transpose(state, (0, 1, 3, 2)), build.numbers(1, 3)])
    states = list[ir.Value]()
    for decay, written in zip(*(build.split(each, [1] * length, 1) for each in (decays, new)), strict=True):
        last = written if last is None else build.op("Add", [build.op("Mul", [last, decay]), written])
        states.append(last)
    read = build.op("Mul", [build.op("Unsqueeze", [whole.q, build.numbers(4)]), build.concat(states, 1)])
    result = build.op("ReduceSum", [read, build.numbers(5)], keepdims=0)
    return result, build.transpose(build.op("Squeeze", [states[-1], build.numbers(1, 3)]), (0, 1, 3, 2))


def _position(build: Builder, part: Part, state: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """Return what `_chunk` returns, for a single position."""
    u = part.v
    if state is not None and part.g is not None:
        state = build.op("Mul", [state, build.transpose(build.op("Exp", [part.g]), _TURNED)])
    if part.b is not None:
        u = u if state is None else build.op("Sub", [u, build.op("MatMul", [part.k, state])])
        u = build.op("Mul", [u, part.b])
    written = build.op("Mul", [build.transpose(part.k, _TURNED), u])
    state = written if state is None else build.op("Add", [state, written])
    return build.op("MatMul", [part.q, state]), state


def _chunk(build: Builder, part: Part, state: ir.Value | None, n: int, rates: int) -> tuple[ir.Value, ir.Value]:
    """Return the results [B, heads, queries per head, n, dv] and the state [B, heads, 1, dk, dv] after a chunk."""
    times, sources = np.ogrid[:n, -1:n]  # source -1 stands for the state before the chunk
    seen = build.constant((times >= sources)[:, 1:].astype(np.float32))
    turned = build.transpose(part.k, _TURNED)
    since = decays = keyed = None  # since is w [.., t, rates], decays E [.., t, s, rates], keyed E · k [.., t, s, dk]
    if part.g is not None:
        later = build.constant((times > sources)[..., None].astype(np.float32))
        sums = build.op("Max", [part.g, build.constant(np.array(_NO_MORE, np.float32))])
        sums = build.op("Mul", [build.op("Unsqueeze", [sums, build.numbers(4)]), later])
        sums = build.op("Reshape", [sums, build.numbers(0, 0, 0, 0, -1)])
        sums = build.op("MatMul", [build.constant(np.tri(n, dtype=np.float32)), sums])
        factors = build.op("Reshape", [build.op("Exp", [sums]), build.numbers(0, 0, 0, 0, n + 1, rates)])
        since, decays = build.split(factors, [1, n], 4)
        since = build.op("Squeeze", [since, build.numbers(4)])
        keyed = build.op("Mul", [decays, build.op("Unsqueeze", [part.k, build.numbers(3)])]) if rates > 1 else None

    def products(rows: ir.Value) -> ir.Value:
        """Return E · (rows Kᵀ)."""
        if keyed is not None:
            product = build.op("Mul", [keyed, build.op("Unsqueeze", [rows, build.numbers(4)])])
            product = build.op("ReduceSum", [product, build.numbers(5)], keepdims=0)
        else:
            product = build.op("MatMul", [rows, turned])
            if decays is not None:
                product = build.op("Mul", [product, build.op("Squeeze", [decays, build.numbers(5)])])
        return build.op("Mul", [product, seen])

    def read(rows: ir.Value, state: ir.Value) -> ir.Value:
        """Return w · (rows S)."""
        return build.op("MatMul", [rows if since is None else build.op("Mul", [rows, since]), state])

    u = part.v
    if part.b is not None:
        u = build.op("Mul", [u if state is None else build.op("Sub", [u, read(part.k, state)]), part.b])
        u = build.op("MatMul", [_inverse(build, build.op("Mul", [products(part.k), part.b]), n), u])
    result = build.op("MatMul", [products(part.q), u])
    if state is not None:
        result = build.op("Add", [result, read(part.q, state)])
    if since is not None and decays is not None:
        rest = build.op("Squeeze", [build.slice(decays, 3, n - 1, n), build.numbers(3)])
        turned = build.transpose(build.op("Mul", [part.k, rest]), _TURNED)
        whole = build.transpose(build.slice(since, 3, n - 1, n), _TURNED)
        state = None if state is None else build.op("Mul", [state, whole])
    written = build.op("MatMul", [turned, u])
    return result, written if state is None else build.op("Add", [state, written])


def _inverse(build: Builder, below: ir.Value, n: int) -> ir.Value:
    """Return (I + the part of `below` below the diagonal)⁻¹, [n, n]; blocks of 2, 4, … rows join two smaller blocks.

    [[A, 0], [C, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ C A⁻¹, D⁻¹]]. A sum of powers would lose all digits for nearly equal keys.
    """
    rows, columns = np.ogrid[:n, :n]
    inverse, size = build.constant(np.eye(n, dtype=np.float32)), 1
    while size < n:
        corners = (rows // size % 2 == 1) & (rows // size == columns // size + 1)
        corner = build.op("Mul", [below, build.constant(corners.astype(np.float32))])
        if size > 1:
            corner = build.op("MatMul", [build.op("MatMul", [inverse, corner]), inverse])
        inverse, size = build.op("Sub", [inverse, corner]), 2 * size
    return inverse


def _cast(build: Builder, value: ir.Value, kind: ir.DataType | None) -> ir.Value:
    """Cast a value to a dtype; return the value itself if it has that dtype."""
    if kind is None or value.dtype == kind:
        return value
    result = build.op("Cast", [value], to=kind.value)
    result.type = ir.TensorType(kind)
    return result
