from pathlib import Path

import pytest

from flash_rt.flashrt_hf.kernels import sync
from flash_rt.flashrt_hf.kernels.manifest import require_workspace


@pytest.mark.parametrize("name", require_workspace().members)
def test_copies_in_this_checkout_are_identical(name):
    workspace = require_workspace()
    assert sync.differences(workspace, workspace.family(name)) == []


def test_copies_changes_and_removes(workspace, family):
    common = workspace.sources / "common"
    for folder, name in (
        ("csrc", "a.h"),
        ("python", "sub/b.py"),
        ("tests", "c.py"),
        ("benchmarks", "d.py"),
    ):
        path = common / folder / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    stray = family.path / "csrc/common/old.h"
    stray.parent.mkdir()
    stray.write_text("old")
    own = family.path / "csrc/own.h"
    own.write_text("own")
    (family.path / "flake.nix").write_text("changed")

    changes = sync.sync(workspace, family)

    where = "kernel_sources/scale"
    assert sorted(changes) == [
        f"{where}/benchmarks/_common/d.py: is missing, copy of"
        " kernel_sources/common/benchmarks/d.py",
        f"{where}/csrc/common/a.h: is missing, copy of kernel_sources/common/csrc/a.h",
        f"{where}/csrc/common/old.h: has no original in kernel_sources/common",
        f"{where}/flake.nix: differs from kernel_sources/common/flake.nix",
        f"{where}/tests/_common/c.py: is missing, copy of kernel_sources/common/tests/c.py",
        f"{where}/torch-ext/scale/_common/sub/b.py: is missing, copy of"
        " kernel_sources/common/python/sub/b.py",
    ]
    assert Path(family.package, "_common/sub/b.py").read_text() == "sub/b.py"
    assert not stray.exists()
    assert own.read_text() == "own"
    assert sync.sync(workspace, family) == []
