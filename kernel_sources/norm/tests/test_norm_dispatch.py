"""What torch needs to know about the ops: schemas, fakes, torch.compile; and the layers."""

import sys

import norm_cases as cases
import pytest
import torch
from _common.tolerance import assert_bitwise


def test_opcheck(norm, device):
    ops = sys.modules[f"{norm.__name__}.ops"].ops
    x = cases.rows(2, 3, 64, dtype=torch.bfloat16, device=device)
    weight = cases.parameter(64, dtype=torch.bfloat16, device=device)
    out, total = torch.empty_like(x), torch.empty_like(x)
    torch.library.opcheck(ops.rms_norm, (x, weight, None, weight, 1e-6, True, False))
    torch.library.opcheck(ops.rms_norm_out, (x, weight, None, None, 1e-6, False, False, out))
    torch.library.opcheck(ops.add_rms_norm, (x, x.clone(), weight, 1e-6, False, False))
    arguments = (x, x.clone(), weight, 1e-6, False, False, out, total)
    torch.library.opcheck(ops.add_rms_norm_out, arguments)
    torch.library.opcheck(ops.layer_norm, (x, weight, weight, None, None, 1e-5, False))
    arguments = (x, weight, None, weight, None, 1e-5, False, out)
    torch.library.opcheck(ops.layer_norm_out, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(norm, device, dynamic):
    def block(x, residual, weight, out):
        y, residual = norm.add_rms_norm(x, residual, weight)
        norm.rms_norm(y, weight, zero_centered=True, out=out)
        return norm.layer_norm(out + 1, weight, scale=weight), residual

    weight = cases.parameter(64, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (2, 5):
        x = cases.rows(tokens, 64, dtype=torch.bfloat16, device=device)
        outputs = torch.empty_like(x), torch.empty_like(x)
        expected = block(x, x, weight, outputs[0])
        actual = compiled(x, x, weight, outputs[1])
        for one, other in zip((*actual, outputs[1]), (*expected, outputs[0]), strict=True):
            assert_bitwise(one, other)


def test_fakes_are_contiguous_like_the_results(norm):
    x = torch.empty(2, 8, 64, device="meta").transpose(0, 1)
    assert norm.rms_norm(x, None).stride() == (128, 64, 1)
    for result in (norm.layer_norm(x), *norm.add_rms_norm(x, x, None)):
        assert result.shape == x.shape
        assert result.is_contiguous()


class Host(torch.nn.Module):
    """A norm as transformers writes it."""

    kernel_layer_name = ""

    def __init__(self, epsilon_name, device):
        super().__init__()
        self.weight = torch.nn.Parameter(cases.parameter(64, dtype=torch.float32, device=device))
        self.bias = torch.nn.Parameter(cases.rows(64, dtype=torch.float32, device=device))
        setattr(self, epsilon_name, 1e-3)

    def forward(self, hidden_states):
        raise AssertionError("the layer is not in place")


@pytest.mark.parametrize(
    "layer,epsilon_name", [("RMSNorm", "variance_epsilon"), ("RMSNorm", "eps"),
                           ("RMSNormZeroCentered", "eps"), ("LayerNorm", "eps")],
)  # fmt: skip
def test_kernelize(norm, device, layer, epsilon_name):
    import kernels

    class Named(Host):
        pass

    kernels.replace_kernel_forward_from_hub(Named, layer)
    host = Named(epsilon_name, device).eval()
    from pathlib import Path

    repo = kernels.LocalLayerRepository(Path(norm.__file__).parent, layer_name=layer)
    with kernels.use_kernel_mapping({layer: {device: repo}}):
        kernels.kernelize(host, mode=kernels.Mode.INFERENCE, device=device, use_fallback=False)
    x = cases.rows(3, 64, dtype=torch.float32, device=device)
    expected = {
        "RMSNorm": lambda: norm.rms_norm(x, host.weight, eps=1e-3),
        "RMSNormZeroCentered": lambda: norm.rms_norm(x, host.weight, eps=1e-3, zero_centered=True),
        "LayerNorm": lambda: norm.layer_norm(x, host.weight, host.bias, eps=1e-3),
    }[layer]()
    assert_bitwise(host(x), expected)
