"""Locks and atomic replacement, so that no reader ever sees half a build."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the folder's lock; says so where another process has it, and waits.

    Yields the lock's file descriptor. A child process that inherits it keeps the lock for as long
    as it runs, so that compilers which outlive a killed builder do not meet those of the next.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder.name}: another build is running, waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A fresh folder beside the variants; removes what killed builds left. Needs the lock."""
    for leftover in folder.glob(".staging-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    target = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder))
    target.chmod(0o755)
    try:
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def replace_folder(new: Path, target: Path) -> None:
    """Put ``new`` at ``target``; what was there moves to ``new``, for the caller to remove.

    The exchange is one system call, so a reader finds either the old or the new folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        new.rename(target)
        return
    if not _exchange(new, target):
        retired = new.with_name(new.name + "-old")
        target.rename(retired)
        new.rename(target)
        retired.rename(new)


def _exchange(first: Path, second: Path) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (os.fsencode(first), os.fsencode(second))
    return bool(rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)
