"""``flash-rt kernels``: build, list, check, sync, env."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from flash_rt.flashrt_hf.kernels import builder, resolver, validate, variant
from flash_rt.flashrt_hf.kernels import sync as sync_module
from flash_rt.flashrt_hf.kernels.check import check_variant
from flash_rt.flashrt_hf.kernels.compile import BuildError
from flash_rt.flashrt_hf.kernels.manifest import (
    Family,
    ManifestError,
    Workspace,
    require_workspace,
)
from flash_rt.flashrt_hf.kernels.toolchain import ToolchainError, find_nvcc

app = typer.Typer(help="Kernel families: build, list, check, sync, env.", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(help="Families; default: all.")]


def select(workspace: Workspace, names: list[str] | None) -> list[Family]:
    return [workspace.family(name) for name in names] if names else workspace.families()


@app.command()
def build(
    families: Names = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="CUDA capability such as 9.0a or 8.0+PTX, 'all', 'native'; repeatable. "
            "Default: the GPUs here, or 9.0a without one."
        ),
    ] = None,
    cpu_only: Annotated[bool, typer.Option(help="Only the reference variant.")] = False,
    skip_without_nvcc: Annotated[
        bool, typer.Option(help="Say so instead of failing where there is no nvcc.")
    ] = False,
) -> None:
    """Write the reference variant of each family and compile it for CUDA with nvcc."""
    workspace = require_workspace()
    archs = [a for text in arch or [] for a in text.split(",")]
    if skip_without_nvcc and not cpu_only:
        cpu_only = _nvcc_is_missing()
    errors = []
    for family in select(workspace, families):
        start = time.perf_counter()
        try:
            _report(family, builder.build_reference(workspace, family))
            if not cpu_only:
                _report(family, builder.build_cuda(workspace, family, archs, say=_progress))
        except (BuildError, ManifestError) as error:  # the other families may still build
            errors.append(str(error))
        typer.echo(f"{family.name}: {time.perf_counter() - start:.1f} s", err=True)
    if errors:
        raise BuildError("\n".join(errors))


def _progress(line: str) -> None:
    typer.echo(line, err=True)


def _report(family: Family, built: builder.Built) -> None:
    typer.echo(f"{family.name}: {built.path.name} {built.action}")


def _nvcc_is_missing() -> bool:
    try:
        find_nvcc()
    except ToolchainError as error:
        typer.echo(f"SKIPPED: CUDA variants are not compiled on this machine\n{error}", err=True)
        return True
    return False


@app.command("list")
def list_builds(families: Names = None) -> None:
    """Show every family's builds: whether they run here, and for which GPUs they were compiled."""
    workspace = require_workspace()
    for family in select(workspace, families):
        typer.echo(f"{family.repo_id} version {family.version}")
        current = variant.source_hash(family)[:7]
        found = resolver.candidates(workspace.builds / family.name)
        for one in found:
            typer.echo(f"  {one.path.name}: {_describe(one, current)}")
        if not found:
            typer.echo(f"  no build; flash-rt kernels build {family.name}")


def _describe(candidate: resolver.Candidate, current: str) -> str:
    metadata = variant.read_metadata(candidate.path)
    archs = metadata.backend.archs if metadata else None
    parts = [f"for {', '.join(archs)}"] if archs else []
    if metadata and not metadata.id.endswith(current):
        parts.append("built from other sources than the checkout's")
    parts.append("runs here" if candidate.rejected is None else candidate.rejected)
    return "; ".join(parts)


@app.command()
def check(families: Names = None) -> None:
    """Prove that the builds comply with the Hub's rules and load through get_kernel."""
    workspace = require_workspace()
    failed = False
    for family in select(workspace, families):
        problems = validate.problems(workspace, family)
        paths = sorted((workspace.builds / family.name / "build").glob("*"))
        if not paths:
            problems.append(f"no build; flash-rt kernels build {family.name}")
        for path in paths:
            report = check_variant(family, path)
            archs = f" ({', '.join(report.archs)})" if report.archs else ""
            problems += [f"{path.name}: {problem}" for problem in report.problems]
            if not report.problems:
                typer.echo(f"{family.name}: {path.name}{archs} complies")
        for problem in problems:
            failed = True
            typer.echo(f"{family.name}: {problem}")
    if failed:
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """Print the line that makes any Python script find the local builds."""
    typer.echo(f"export LOCAL_KERNELS='{resolver.environment_line(require_workspace())}'")


@app.command()
def sync(
    families: Names = None,
    check: Annotated[bool, typer.Option(help="Change nothing; fail where a copy differs.")] = False,
) -> None:
    """Copy kernel_sources/common into the families."""
    workspace = require_workspace()
    found = []
    for family in select(workspace, families):
        found += (sync_module.differences if check else sync_module.sync)(workspace, family)
    for line in found:
        typer.echo(line)
    if found and check:
        raise ManifestError("kernels: copies differ; run `flash-rt kernels sync`")
