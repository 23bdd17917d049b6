"""What torch needs to know about the ops: schemas, fakes, torch.compile; and the layers."""

import sys
from pathlib import Path

import activation_cases as cases
import pytest
import torch
from _common.tolerance import assert_bitwise


def test_opcheck(activation, device):
    ops = sys.modules[f"{activation.__name__}.ops"].ops
    x = cases.values(2, 3, 64, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    for number in range(len(activation.ACTIVATIONS)):
        torch.library.opcheck(ops.activate, (x, number))
    torch.library.opcheck(ops.activate, (x.transpose(0, 1), 1))
    torch.library.opcheck(ops.activate_out, (x, 1, out))
    torch.library.opcheck(ops.gated, (x, x.clone(), 1))
    torch.library.opcheck(ops.gated_out, (x, x.clone(), 1, out))
    torch.library.opcheck(ops.gated_packed, (x, 1, False))
    half = torch.empty(2, 3, 32, dtype=x.dtype, device=device)
    torch.library.opcheck(ops.gated_packed_out, (x, 1, True, half))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(activation, device, dynamic):
    def block(x, out):
        hidden = activation.activate(x, activation="gelu_tanh")
        activation.gated(hidden, x, out=out)
        return activation.gated_packed(out + 1, gate_first=False)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (2, 5):
        x = cases.values(tokens, 64, dtype=torch.bfloat16, device=device)
        outputs = torch.empty_like(x), torch.empty_like(x)
        assert_bitwise(compiled(x, outputs[1]), block(x, outputs[0]))
        assert_bitwise(outputs[1], outputs[0])


LAYERS = {
    "SiLU": "silu",
    "GeLU": "gelu",
    "GeluTanh": "gelu_tanh",
    "NewGELU": "gelu_tanh",
    "FastGELU": "gelu_tanh",
    "QuickGELU": "quick_gelu",
}


@pytest.mark.parametrize("layer", LAYERS)
def test_kernelize(activation, device, layer):
    import kernels

    class Host(torch.nn.Module):
        def forward(self, input):
            raise AssertionError("the layer is not in place")

    kernels.replace_kernel_forward_from_hub(Host, layer)
    host = Host().eval()
    repo = kernels.LocalLayerRepository(Path(activation.__file__).parent, layer_name=layer)
    with kernels.use_kernel_mapping({layer: {device: repo}}):
        kernels.kernelize(host, mode=kernels.Mode.INFERENCE, device=device, use_fallback=False)
    x = cases.values(3, 64, dtype=torch.bfloat16, device=device)
    assert_bitwise(host(x), activation.activate(x, activation=LAYERS[layer]))
