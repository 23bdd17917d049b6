"""A plain PyTorch model attaches where transformers and diffusers cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("transformers", "diffusers", "accelerate", "peft"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return None

    sys.meta_path.insert(0, Blocker())

    import torch
    import torch.nn.functional as F
    from torch import nn

    from flash_rt import structures


    class Rms(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width))
            self.eps = 1e-5

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = Rms(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
            self.ffn = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
            self.glu_in, self.glu_out = nn.Linear(width, 2 * width), nn.Linear(width, width)

        def forward(self, x):
            batch, tokens, width = x.shape
            heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, 4, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
            gate, up = self.glu_in(x).chunk(2, -1)
            return x + self.ffn(self.norm2(x)) + self.glu_out(F.silu(gate) * up)


    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), Block(32), Block(32), nn.Linear(32, 50)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    ids = torch.randint(0, 50, (2, 6))
    with torch.no_grad():
        host = model(ids)
        plan = structures.attach(model, model.forward)
        ours = [model(ids) for _ in range(3)]
        kinds = sorted(row.structure for row in plan.bound())
        plan.detach()
        again = model(ids)
    limit = 1e-5 * host.abs().max()
    assert all((o - host).abs().max() < limit for o in ours)
    assert torch.equal(again, host)
    block = ["layer_norm", "linear", "linear", "linear", "linear", "mlp", "rms_norm"]
    assert kinds == sorted([*block, *block, "linear"]), kinds
    assert str(structures.explain(plan))
    assert not {"transformers", "diffusers"} & set(sys.modules)
    print("fine")
"""


def test_attach_without_transformers() -> None:
    script = textwrap.dedent(SCRIPT)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"
