import pytest

from flash_rt.flashrt_hf.kernels import validate
from flash_rt.flashrt_hf.kernels.manifest import (
    ManifestError,
    capability_number,
    require_workspace,
)


@pytest.mark.parametrize("name", require_workspace().members)
def test_families_of_this_checkout_are_valid(name):
    workspace = require_workspace()
    assert validate.problems(workspace, workspace.family(name)) == []


def test_scratch_family_is_valid(workspace, family):
    assert validate.problems(workspace, family) == []


def test_unknown_family_lists_the_members(workspace):
    with pytest.raises(ManifestError) as caught:
        workspace.family("norms")
    assert str(caught.value) == "kernels: no family 'norms'; the families are scale"


def edit(family, old, new):
    path = family.path / "build.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            'stable-abi = "2.11"',
            'stable-abi = "2.12"',
            "torch.stable-abi must be '2.11' as in the workspace's build.toml, got '2.12'",
        ),
        (
            '"9.0a", ',
            "",
            "cuda-capabilities must be ('8.0', '8.6', '8.7', '8.9', '9.0a', '10.0f', '11.0f',"
            " '12.0f') as in the workspace's build.toml, got ('8.0', '8.6', '8.7', '8.9',"
            " '10.0f', '11.0f', '12.0f')",
        ),
        (
            "flashrt/scale",
            "other/scale",
            "general.hub.repo-id must be 'flashrt/scale' as in the workspace's build.toml,"
            " got 'other/scale'",
        ),
        ("csrc/scale.cu", "csrc/missing.cu", "lists csrc/missing.cu, which is not there"),
        ("csrc/scale.cu", "csrc/missing.cu", "does not list csrc/scale.cu"),
    ],
)
def test_disagreement_is_reported(workspace, family, old, new, problem):
    edit(family, old, new)
    assert f"scale/build.toml: {problem}" in validate.problems(workspace, family)


def test_kernels_own_parser_refuses_unknown_keys(workspace, family):
    edit(family, "version = 1", "version = 1\nunheard-of = 2")
    (problem,) = validate.problems(workspace, family)
    assert problem.startswith("scale/build.toml: ")
    assert "unheard-of" in problem


def test_malformed_toml_names_the_file(workspace, family):
    (workspace.root / "build.toml").write_text("[workspace")
    with pytest.raises(ManifestError, match=r"build\.toml: "):
        _ = type(workspace)(workspace.root).members


@pytest.mark.parametrize(
    ("text", "number"), [("8.0", (8, 0)), ("9.0a", (9, 0)), ("12.0f", (12, 0)), ("8.9+PTX", (8, 9))]
)
def test_capability_number(text, number):
    assert capability_number(text) == number


@pytest.mark.parametrize("text", ["90", "sm_90", "9.0b", "9", ""])
def test_bad_capability(text):
    with pytest.raises(ManifestError, match="arch: must be like 8.0, 9.0a"):
        capability_number(text)
