"""What all kernel families have in common, and what structures repeat of them."""

import pytest

from flash_rt.flashrt_hf.kernels import resolver
from flash_rt.flashrt_hf.kernels.manifest import require_workspace


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
