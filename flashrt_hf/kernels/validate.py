"""Hold a family's sources to kernels' own parser and to the workspace manifest."""

from __future__ import annotations

from kernels._rust import Build

from flash_rt.flashrt_hf.kernels.manifest import Family, ManifestError, Workspace


def check_family(workspace: Workspace, family: Family, *, cuda: bool) -> None:
    """Raise where a build would be wrong; see :func:`problems`.

    Raises:
        ManifestError: lists every problem.
    """
    found = problems(workspace, family, cuda=cuda)
    if found:
        raise ManifestError("\n".join(found))


def problems(workspace: Workspace, family: Family, *, cuda: bool = True) -> list[str]:
    """What is wrong with the family's build.toml and sources; empty when nothing is.

    Args:
        cuda: False leaves out the files that only a CUDA build reads.
    """
    where = f"{family.name}/build.toml"
    try:
        Build.open(family.path)
    except ValueError as error:
        return [f"{where}: {error}"]
    found = [*_package(family), *_agreement(workspace, family)]
    if cuda:
        found += _cuda_files(family)
    return [f"{where}: {text}" for text in found]


def _cuda_files(family: Family) -> list[str]:
    found = []
    listed = [*family.binding_sources]
    for kernel in family.cuda_kernels:
        listed += [*kernel.sources, *kernel.include]
    for name in (*listed, *family.binding_include):
        if not (family.path / name).exists():
            found.append(f"lists {name}, which is not there")
    for path in sorted((family.path / "csrc").rglob("*.cu")):
        name = path.relative_to(family.path).as_posix()
        if name not in listed:
            found.append(f"does not list {name}")
    return found


def _package(family: Family) -> list[str]:
    found = []
    if not (family.package / "__init__.py").is_file():
        found.append(f"has no torch-ext/{family.python_name}/__init__.py")
    if (family.package / "_ops.py").exists():
        found.append(f"torch-ext/{family.python_name}/_ops.py must not exist: builds generate it")
    return found


def _agreement(workspace: Workspace, family: Family) -> list[str]:
    general = family.config["general"]
    kernel = f"{family.python_name}_cuda"
    expected: list[tuple[str, object, object]] = [
        ("general.name", general.get("name"), family.name),
        ("general.edition", general.get("edition"), 5),
        ("general.license", general.get("license"), "apache-2.0"),
        ("general.backends", general.get("backends"), ["cpu", "cuda"]),
        ("general.hub.repo-id", general.get("hub", {}).get("repo-id"), family.repo_id),
        (
            "general.cuda.minver",
            general.get("cuda", {}).get("minver"),
            workspace.config["cuda-minver"],
        ),
        (
            "torch.stable-abi",
            family.config.get("torch", {}).get("stable-abi"),
            workspace.config["torch-stable-abi"],
        ),
        ("kernel sections", list(family.config.get("kernel", {})), [kernel]),
        ("cuda-capabilities", family.capabilities, workspace.capabilities),
    ]
    return [
        f"{name} must be {wanted!r} as in the workspace's build.toml, got {value!r}"
        for name, value, wanted in expected
        if value != wanted
    ]
