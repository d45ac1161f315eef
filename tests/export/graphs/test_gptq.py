"""GPTQ: products with the inputs that a matrix met lose less than by plain rounding, in the same parts."""

from __future__ import annotations

import pytest
import torch
from txl_export.graphs.gptq import round_to_inputs
from txl_export.graphs.quantising import dequantise, quantise

NAME = "layers.00.attention.output.weight"


def drawn(size: int, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [size, width], and the sum of x xᵀ over 2,000 rows of inputs that are correlated."""
    draws = torch.Generator().manual_seed(size)
    mix = torch.randn(size // 4, size, generator=draws)
    rows = torch.randn(2000, size // 4, generator=draws) @ mix + 0.3 * torch.randn(2000, size, generator=draws)
    return torch.randn(size, width, generator=draws), rows.double().T @ rows.double()


def stored(matrix, inputs=None):
    """The matrix that int4's parts stand for, float32 [in, out]."""
    return dequantise(quantise({NAME: matrix}, "int4", [NAME], inputs=inputs and {NAME: inputs[0]}))[NAME]


def lost(matrix, found, inputs):
    """The squared error of products with those inputs."""
    error = (matrix - found).double()
    return float((error * (inputs @ error)).sum())


@pytest.mark.parametrize("size", [64, 192, 100, 256])
def test_products_with_the_inputs_lose_less_than_half_of_what_rounding_loses(size):
    matrix, inputs = drawn(size)
    rounded, fitted = (lost(matrix, found, inputs) for found in (stored(matrix), stored(matrix, (inputs,))))
    assert 0 < fitted < rounded / 2


@pytest.mark.parametrize("size", [16, 96, 192, 410, 512])
def test_the_parts_are_those_of_rounding_in_names_types_and_shapes(size):
    matrix, inputs = drawn(size)
    rounded, fitted = (
        quantise({NAME: matrix}, "int4", [NAME]),
        quantise({NAME: matrix}, "int4", [NAME], (), False, {NAME: inputs}),
    )
    assert [*fitted] == [*rounded]
    for name, part in fitted.items():
        assert (part.dtype, part.shape, part.is_contiguous()) == (rounded[name].dtype, rounded[name].shape, True)
    assert float((dequantise(fitted)[NAME] - matrix).abs().max()) < 0.6 * float(matrix.abs().max())


def test_codes_behind_the_last_input_stand_for_zero():
    matrix, inputs = drawn(40)
    codes, _, zeros = round_to_inputs(matrix, inputs, 32)
    assert codes.shape == (24, 2, 32)
    assert torch.equal(codes[:, 1, 8:], zeros[:, 1, None].expand(-1, 24))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_second_rounding_gives_the_same_bytes_whatever_the_threads(threads):
    matrix, inputs = drawn(256)
    before = torch.get_num_threads()
    first = round_to_inputs(matrix, inputs.clone(), 128)
    torch.set_num_threads(threads)
    try:
        second = round_to_inputs(matrix, inputs.clone(), 128)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_inputs_that_never_came_are_rounded_plainly_and_disturb_no_other():
    matrix, inputs = drawn(64)
    dead = torch.arange(64) % 5 == 0
    inputs[dead], inputs[:, dead] = 0, 0
    matrix[dead] *= 0.1  # the others decide the scale
    found, changed = stored(matrix, (inputs,)), matrix.clone()
    changed[dead] *= -1
    assert torch.equal(stored(changed, (inputs,))[~dead], found[~dead])
    step = (matrix.amax(0) - matrix.amin(0)) / 15
    assert bool(((found - matrix)[dead].abs() <= 0.51 * step).all())


@pytest.mark.parametrize("row", [0.0, 1.0, 1e18, 1e-18])
def test_inputs_that_are_always_the_same_give_a_matrix_near_the_original(row):
    matrix, _ = drawn(64)
    same = torch.full((64,), row, dtype=torch.float64)
    found = stored(matrix, (1000 * torch.outer(same, same),))
    assert bool(found.isfinite().all())
    assert float((found - matrix).abs().max()) < float((matrix.amax(0) - matrix.amin(0)).max()) / 2
    if row:
        assert float((found - matrix).sum(0).abs().max()) < 0.6 * float((matrix.amax(0) - matrix.amin(0)).max()) / 15
