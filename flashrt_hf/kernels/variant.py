"""The files of one build variant that are generated: identifier, metadata.json, _ops.py."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

from flash_rt.flashrt_hf.kernels.manifest import Family

REFERENCE_VARIANT = "torch-cpu"

# Part of every content hash: a build is as old as the builder that made it.
_BUILDER_SOURCES = tuple(Path(__file__).with_name(name) for name in ("compile.py", "glibc.py"))

_OPS_CPU = '''"""Generated: the namespace of this build's operators."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """``op_name`` -> ``namespace::op_name``."""
    return f"{id}::{{op_name}}"
'''
_OPS_CUDA = _OPS_CPU.replace("import torch\n", "import torch\n\nfrom . import {id}  # noqa: F401\n")


def cuda_variant(family: Family, cuda: tuple[int, int]) -> str:
    """Name of the stable-ABI CUDA variant for this machine's processor."""
    abi = family.stable_abi.replace(".", "")
    return f"torch-stable-abi{abi}-cu{cuda[0]}{cuda[1]}-{platform.machine()}-linux"


def source_hash(family: Family) -> str:
    """Hex SHA-256 over names and contents of everything that goes into a build."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _BUILDER_SOURCES))
    files = [family.path / "build.toml"]
    for folder in ("csrc", "torch-ext"):
        files += [p for p in (family.path / folder).rglob("*") if p.is_file()]
    for path in sorted(files):
        if "__pycache__" in path.parts:
            continue
        content = path.read_bytes()
        name = path.relative_to(family.path).as_posix()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def variant_id(family: Family, backend: str, content_hash: str) -> str:
    """Module name and operator namespace of a build."""
    return f"_{family.python_name}_{backend}_{content_hash[:7]}"


def write_python_files(family: Family, identifier: str, target: Path, *, backend: str) -> None:
    """Copy the family's package into ``target`` and generate ``_ops.py``."""
    shutil.copytree(
        family.package,
        target,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
    )
    template = _OPS_CUDA if backend == "cuda" else _OPS_CPU
    (target / "_ops.py").write_text(template.format(id=identifier), encoding="utf-8")


def write_metadata(
    family: Family, identifier: str, target: Path, *, backend: str, archs: tuple[str, ...] = ()
) -> None:
    """Write ``metadata.json`` last: with its digest it vouches for every other file."""
    general = family.config["general"]
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, target)
    metadata = {
        "name": family.name,
        "id": identifier,
        "version": family.version,
        "license": general["license"],
        "python-depends": general.get("python-depends", []),
        "backend": {"type": backend, **({"archs": list(archs)} if archs else {})},
        "digest": {"algorithm": str(digest.algorithm), "files": dict(sorted(digest.files.items()))},
    }
    text = json.dumps(metadata, indent=2) + "\n"
    Metadata.from_bytes(text.encode())
    (target / "metadata.json").write_text(text, encoding="utf-8")


def read_metadata(variant: Path) -> Metadata | None:
    """Metadata of a variant folder whose files all match its digest; None for anything else."""
    before = _metadata_bytes(variant)
    while before is not None:
        metadata = _validated(variant, before)
        after = _metadata_bytes(variant)
        if metadata is not None or after == before:
            return metadata
        before = after  # the folder was replaced while it was being read
    return None


def _metadata_bytes(variant: Path) -> bytes | None:
    try:
        return (variant / "metadata.json").read_bytes()
    except OSError:
        return None


def _validated(variant: Path, content: bytes) -> Metadata | None:
    try:
        metadata = Metadata.from_bytes(content)
        if metadata.digest is None:
            return None
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    except (ValueError, OSError, DigestValidationError):
        return None
    return metadata
