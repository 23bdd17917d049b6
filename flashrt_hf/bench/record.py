"""Records: one JSON file a run, with everything that is needed to repeat it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .timing import wall_ms

SCHEMA = 1
PACKAGES = ("torch", "transformers", "kernels", "triton", "numpy")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """First line that ``command`` prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def commit() -> str:
    """The checkout's commit, ``+dirty`` where tracked files differ, ``unknown`` without one."""
    here = Path(__file__).resolve().parent
    head = _output("git", "rev-parse", "HEAD", cwd=here)
    if not head:
        return "unknown"
    dirty = _output("git", "status", "--porcelain", "--untracked-files=no", cwd=here)
    return f"{head}+dirty" if dirty else head


def environment(device: torch.device, *, commit_id: str | None = None) -> dict[str, Any]:
    """Describe device, driver, versions and commit."""
    found: dict[str, Any] = dict(
        commit=commit_id or commit(),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        device_type=device.type,
    )
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= dict(
            device=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            cuda=torch.version.cuda,
            driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        )
    else:
        found |= dict(
            device=platform.processor() or platform.machine(), threads=torch.get_num_threads()
        )
    return found


def read_bandwidth(device: torch.device, *, size_bytes: int = 4 << 30, rounds: int = 5) -> float:
    """Bytes a second of the fastest read-only pass over ``size_bytes``: the ceiling of a decode."""
    data = torch.empty(size_bytes // 4, dtype=torch.float32, device=device).normal_()
    data.amax()
    return size_bytes / min(wall_ms(lambda: data.amax(), device) for _ in range(rounds)) * 1e3


def start(
    name: str,
    device: torch.device,
    *,
    settings: Mapping[str, Any],
    commit_id: str | None = None,
) -> dict[str, Any]:
    """Begin a record of the benchmark ``name`` with its settings."""
    return dict(
        schema=SCHEMA,
        benchmark=name,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        settings=dict(settings),
        environment=environment(device, commit_id=commit_id),
        parts={},
    )


def write(record: dict[str, Any], path: Path) -> None:
    """Write ``record`` to ``path`` atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, allow_nan=False)
            file.write("\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def read(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ValueError: the file was written by another schema.
    """
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record.get("schema") != SCHEMA:
        raise ValueError(
            f"bench: record {path} must have schema {SCHEMA}, got {record.get('schema')!r}"
        )
    return record
