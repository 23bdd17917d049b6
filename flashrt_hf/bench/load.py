"""Part ``load``: from a command to the first token, in processes of their own.

The model lies in a folder: ``smollm2`` its own, a model of true shape in one that is written once
under ``build/models``. Every round is a new process, before which the folder's pages are dropped
from the system's cache where that is possible; in it the model is loaded, answers a token, is
closed and loaded again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..host import DTYPES, REAL_MODEL
from ..kernels.install import locked, replace_folder, staging
from . import models, record
from .session import build_folder, default_path, say

STAGES = ("weights_s", "attach_s", "load_s", "first_token_s", "total_s", "second_first_token_s")


def main(options: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Run the part; the record and where it is."""
    device = torch.device(options.device)
    folder = model_folder(options.model, device=device, dtype=options.dtype)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "commit")}
    begun = record.start("load", device, settings=settings, commit_id=options.commit)
    begun["model"] = dict(name=options.model, file_bytes=size)
    path = Path(options.json) if options.json else default_path(options.model, ["load"], device)
    rounds = []
    for number in range(options.repeats):
        dropped = drop_pages(files)
        say(f"load: round {number + 1} of {options.repeats}, a new process")
        rounds.append(run_once(folder, options) | dict(pages_dropped=dropped))
        begun["parts"]["load"] = summary(rounds, options)
        record.write(begun, path)
        say(f"load: {rounds[-1]['total_s']:.2f} s to the first token")
    return begun, path


def model_folder(name: str, *, device: torch.device, dtype: str) -> Path:
    """Where the model lies as safetensors; a model of true shape is written on the first call."""
    if name == REAL_MODEL:
        from ..real_model import folder

        return folder()
    target = build_folder() / "models" / f"{name}-{dtype}"
    with locked(target.parent):
        if (target / "config.json").is_file():
            return target
        say(f"load: writing {name} into {target}, once")
        model = models.build(name, device=device, dtype=DTYPES[dtype])
        with staging(target.parent) as temporary:
            model.save_pretrained(temporary, max_shard_size="4GB")
            replace_folder(temporary, target)
            temporary.mkdir(exist_ok=True)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return target


def drop_pages(files: list[Path]) -> bool:
    """Let the system forget what it holds of the files, so that they are read from the disk.

    Returns:
        Whether the system could be asked; it drops clean pages that nobody has mapped.
    """
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return False
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            advise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def run_once(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What one process measured.

    Raises:
        RuntimeError: it failed; the text is the last line of what it said.
    """
    command = [sys.executable, "-m", "flash_rt.flashrt_hf.bench.load_once", str(folder)]
    names = ("device", "dtype", "prompt", "cache")
    command += [text for name in names for text in (f"--{name}", str(getattr(options, name)))]
    command += ["--precision", *options.precision]
    done = subprocess.run(
        [*command, "--begun", repr(time.time())], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        last = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"bench: load failed in its own process: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def summary(rounds: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and every round."""

    def medians(name: str) -> dict[str, float]:
        keys = [key for key in STAGES if key in rounds[0][name]]
        return {key: statistics.median(r[name][key] for r in rounds) for key in keys}

    return dict(
        prompt_tokens=options.prompt,
        cache_tokens=options.cache,
        precision=options.precision[0],
        total_s=statistics.median(r["total_s"] for r in rounds),
        interpreter_s=statistics.median(r["interpreter_s"] for r in rounds),
        import_s=statistics.median(r["import_s"] for r in rounds),
        cold=medians("cold"),
        again=medians("again"),
        rounds=rounds,
    )
