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
