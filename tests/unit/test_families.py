"""What all kernel families have in common, and what structures repeat of them."""

import importlib

import pytest
import torch

from flash_rt.flashrt_hf.kernels import resolver
from flash_rt.flashrt_hf.kernels.manifest import require_workspace
from flash_rt.structures.catalogue import spec


@pytest.mark.parametrize("name", require_workspace().members)
def test_an_unknown_kernel_names_the_family_and_what_it_has(name):
    family = resolver.load(name)
    assert {"ops", "nope"}.isdisjoint(family.__all__)
    with pytest.raises(AttributeError) as caught:
        _ = family.nope
    known = ", ".join(sorted(family.__all__))
    assert str(caught.value) == f"{name}: no kernel 'nope'; it has {known}"
    assert getattr(family, "nope", None) is None
    assert all(getattr(family, known) is not None for known in family.__all__)


def test_structures_know_the_activations_of_the_kernels():
    kernels = importlib.import_module(f"{resolver.load('activation').__name__}._common.activations")
    assert sorted(spec.ACTIVATIONS) == sorted(kernels.ACTIVATIONS)
    x = torch.linspace(-6, 6, 1201)
    for number, name in enumerate(kernels.ACTIVATIONS):
        ours, theirs = spec.activation_value(name, x), kernels.apply_activation(x, number)
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("form", ["fp8", "fp8_blocks", "int8", "nvfp4"])
def test_linear_reads_what_quant_writes(form):
    """Weights packed by one family dequantise to the same values in the other."""
    quant, linear = resolver.load("quant"), resolver.load("linear")
    weight = torch.randn((150, 340), generator=torch.Generator().manual_seed(0))
    weight[7, 32:64] = 0.0
    if form == "nvfp4":
        packed = quant.quantize_nvfp4(weight)
        data, scale = quant.tile_nvfp4(packed.codes, packed.block_scales), packed.global_scale
        dense = quant.dequantize_nvfp4(*packed, dtype=torch.float32)
        scale = scale.expand(150).contiguous()
    elif form == "int8":
        data, scale = quant.quantize_int8(weight)
        dense = quant.dequantize_int8(data, scale, dtype=torch.float32)
    else:
        data, scale = quant.quantize_fp8(weight)
        if form == "fp8_blocks":
            scale = 0.01 + torch.arange(6.0).view(2, 3) / 100
        dense = quant.dequantize_fp8(data, scale, dtype=torch.float32)
    table = linear.PackedWeight(data, scale, (150, 340))
    rows = linear.embedding(torch.arange(150), table, out_dtype=torch.float32)
    assert torch.equal(rows, dense)
    x = torch.randn((3, 340), generator=torch.Generator().manual_seed(1))
    product = linear.linear(x, table)
    assert torch.allclose(product, x @ dense.t(), rtol=1e-5, atol=1e-4)
