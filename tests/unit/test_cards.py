"""What the families' cards claim about GPUs."""

import re

import pytest

from flash_rt.flashrt_hf.kernels.manifest import require_workspace

WORKSPACE = require_workspace()
ROW = re.compile(r"^\| (\d+\.\d[af]?) \|[^|]*\|[^|]*\|([^|]*)\|$", re.MULTILINE)


@pytest.mark.parametrize("name", WORKSPACE.members)
def test_a_card_names_every_capability_and_a_record_where_it_ran(name):
    family = WORKSPACE.family(name)
    rows = ROW.findall((family.path / "CARD.md").read_text())
    assert tuple(capability for capability, _ in rows) == family.capabilities
    for capability, run in rows:
        records = re.findall(r"[\w.-]+\.json", run)
        assert bool(records) == bool(run.strip()), (capability, run)
        for record in records:
            assert (WORKSPACE.root / "benchmarks/records" / record).is_file(), record
