"""Packed linear layers against the plain product: each within the error its bits allow, and every token for itself."""

from __future__ import annotations

import pytest
import torch

from forebay.engine.config import Precision
from forebay.engine.model_errors import UnsupportedModel
from forebay.engine.ops.linear import Int4Linear, Int8Linear, compute_dtype, linear_for


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Relative error of a product of random values: bf16 rounds by 2^-8, 8 bits by 1/254 of a range, 4 bits by 1/30.
BOUNDS: dict[Precision, float] = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.006, "int8": 0.015, "int4": 0.12}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_layer_is_near_the_plain_product(precision: Precision, tokens: int, biased: bool) -> None:
    dtype = compute_dtype(precision)
    weight, bias, x = (drawn(i, *shape).to(dtype) for i, shape in enumerate(((192, 96), (192,), (tokens, 96))))
    found = linear_for(precision, "cpu")(weight, bias if biased else None)(x)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert found.dtype == dtype and found.shape == (tokens, 192)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < BOUNDS[precision]
    if precision.startswith("int"):
        assert error > BOUNDS[precision] / 10  # it is quantised, and the bound is no idle one


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_token_is_computed_for_itself(kind: type[Int8Linear] | type[Int4Linear]) -> None:
    """An outlier beside it in the batch changes nothing."""
    layer = kind(drawn(1, 64, 96).bfloat16(), None)
    x = drawn(2, 4, 96).bfloat16()
    beside = torch.cat((x, 1000 * x))
    assert torch.equal(layer(beside)[:4], layer(x))


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_zeros_stay_zeros_and_nan_shows(kind: type[Int8Linear] | type[Int4Linear]) -> None:
    layer = kind(drawn(1, 64, 96).bfloat16(), None)
    x = torch.zeros(2, 96, dtype=torch.bfloat16)
    assert torch.equal(layer(x), torch.zeros(2, 64, dtype=torch.bfloat16))
    x[1, 3] = float("nan")
    assert layer(x)[1].isnan().all()


def test_a_weight_that_has_no_int4_groups_is_refused() -> None:
    with pytest.raises(UnsupportedModel):
        Int4Linear(torch.zeros(64, 40), None)


def test_a_precision_without_a_kernel_on_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        linear_for("int8", "cuda")
