"""What torch needs to know about the ops: schemas, fakes, torch.compile."""

import sys

import attention_cases as cases
import pytest
import torch
from _common.tolerance import assert_bitwise


def low_level(attention):
    return sys.modules[f"{attention.__name__}.ops"].ops


def test_opcheck(attention, device):
    ops = low_level(attention)
    a = cases.inputs(cases.Case(lengths=(9, 3), tokens=2, norm="head"), torch.bfloat16, device)
    tables = (a["cos"], a["sin"], a["q_norm_weight"], a["k_norm_weight"])
    norm = (1e-6, False, False, False)
    scores = (0.125, 0, 0.0, False)
    scratch = attention.workspace(2, 2, 4, 64, 192, device)
    out, k_out = torch.empty_like(a["q"]), torch.empty_like(a["k"])
    caches = (a["k_cache"], a["v_cache"])
    torch.library.opcheck(
        ops.attend,
        (a["q"], a["k"], a["v"], *caches, a["lengths"], None, None, *tables, scratch, out, *norm,
         *scores),
    )  # fmt: skip
    per_token = (a["cos"][:2].expand(2, 2, 64).contiguous(),) * 2
    torch.library.opcheck(
        ops.norm_rope, (a["q"], a["k"], *per_token, None, None, *norm, out, k_out)
    )
    torch.library.opcheck(ops.append, (a["k"], a["v"], *caches, a["lengths"], None, None))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [64, 48])
def test_compile(attention, device, dim, dynamic):
    def step(a, out):
        q, k = attention.norm_rope(a["q"], a["k"], q_norm_weight=a["q_norm_weight"])
        attention.append(k, a["v"], a["k_cache"], a["v_cache"], a["lengths"])
        first = attention.attend(**(a | {"q": q * 2}))
        attention.attend(**a, out=out)
        return first + out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ((9, 3), (20, 1)):
        case = cases.Case(lengths=lengths, tokens=2, norm="head", dim=dim)
        results = []
        for function in (step, compiled):
            a = cases.inputs(case, torch.bfloat16, device)
            out = torch.empty_like(a["q"])
            results.append((function(a, out), out, a["k_cache"], a["v_cache"]))
        for one, other in zip(*results, strict=True):
            assert_bitwise(one, other)


def test_fakes(attention):
    a = cases.inputs(cases.Case(lengths=(1, 2), tokens=3, norm="head"), torch.bfloat16, "meta")
    out = attention.attend(**a, workspace=attention.workspace(2, 3, 4, 64, 192, "meta"))
    assert out.shape == a["q"].shape and out.dtype == torch.bfloat16 and out.is_contiguous()
    q, k = attention.norm_rope(a["q"].transpose(1, 2).contiguous().transpose(1, 2), a["k"])
    assert q.shape == a["q"].shape and k.shape == a["k"].shape
    assert q.is_contiguous() and k.is_contiguous()
    assert attention.append(a["k"], a["v"], a["k_cache"], a["v_cache"], a["lengths"]) is None


def test_layers_are_none(attention):
    assert attention.layers.__all__ == []
