"""quantize_nvfp4 with a hessian: rounding errors that other columns make up for."""

import re

import pytest
import quant_cases as cases
import torch
from _common.tolerance import assert_bitwise


def inputs(rows, columns, device, seed=0):
    """Correlated inputs whose columns differ in size, as those of a layer do."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns // 4, columns, generator=generator)
    x = torch.randn(rows, columns // 4, generator=generator) @ mix
    x = x + 0.3 * torch.randn(rows, columns, generator=generator)
    return (x * (torch.rand(columns, generator=generator) * 3 + 0.1)).to(device)


def output_error(quant, weight, x, **given):
    found = quant.quantize_nvfp4(weight, **given)
    values = quant.dequantize_nvfp4(*found, columns=weight.shape[1], dtype=torch.float32)
    return float(((weight - values) @ x.T).square().mean())


@pytest.mark.parametrize("columns", [64, 200, 320])
def test_outputs_err_less(quant, device, columns):
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(1)).to(device)
    x = inputs(512, columns, device)
    hessian = (x.T @ x / len(x)).contiguous()
    plain = output_error(quant, weight, x)
    weighed = output_error(quant, weight, x, importance=x.square().mean(0))
    refined = output_error(quant, weight, x, hessian=hessian)
    assert refined < 0.5 * weighed
    assert weighed < plain
    fresh = inputs(512, columns, device)[:256]  # the same distribution
    assert output_error(quant, weight, fresh, hessian=hessian) < 0.5 * output_error(
        quant, weight, fresh
    )


@pytest.mark.parametrize("shape", [(3, 15), (5, 64), (2, 300)])
def test_inputs_without_correlation_change_nothing(quant, device, shape):
    weight = cases.rows(*shape, device=device)
    for hessian in (torch.eye(shape[1]) * 4, torch.zeros(shape[1], shape[1])):
        found = quant.quantize_nvfp4(weight, hessian=hessian.to(device))
        for one, other in zip(found, quant.quantize_nvfp4(weight), strict=True):
            assert_bitwise(one.view(torch.uint8), other.view(torch.uint8))


def test_columns_that_never_occur(quant, device):
    x = inputs(64, 48, device)
    x[:, 20:30] = 0
    weight = torch.randn(8, 48, generator=torch.Generator().manual_seed(2)).to(device)
    found = quant.quantize_nvfp4(weight, hessian=x.T @ x)
    assert quant.dequantize_nvfp4(*found).isfinite().all()


def test_empty(quant, device):
    found = quant.quantize_nvfp4(
        torch.empty(0, 32, device=device), hessian=torch.eye(32, device=device)
    )
    assert found.codes.shape == (0, 16)


def test_errors(quant):
    weight, hessian = torch.ones(4, 32), torch.eye(32)
    for given, message in (
        (dict(hessian=torch.eye(31)), "hessian must have shape (32, 32), got (31, 31)"),
        (dict(hessian=hessian.double()), "hessian must be float32, got float64"),
        (dict(hessian=hessian / 0), "hessian must be finite, got a NaN or an infinity"),
        (
            dict(hessian=hessian, importance=torch.ones(32)),
            "importance must be None when hessian is given, got a tensor",
        ),
        (
            dict(hessian=2 * hessian - torch.ones(32, 32)),
            "hessian must be positive semidefinite, got one that is not",
        ),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(f"quantize_nvfp4: {message}")):
            quant.quantize_nvfp4(weight, **given)
