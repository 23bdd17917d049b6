"""One benchmark run: one model, its host twin, and the record that the parts fill."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..host import DTYPES, load_host
from . import models, quantised_peers, record

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclasses.dataclass
class Session:
    """What all parts of a run share.

    ``model`` is the one FlashRT attaches to; ``host`` is a second object over the same weights that
    stays untouched.
    """

    name: str
    model: PreTrainedModel
    host: PreTrainedModel
    device: torch.device
    options: argparse.Namespace
    record: dict[str, Any]
    path: Path

    @property
    def traffic(self) -> models.Traffic:
        return models.traffic(self.host)

    @property
    def vocab_size(self) -> int:
        return int(self.host.config.get_text_config().vocab_size)

    def prompt(self, tokens: int, *, rows: int = 1, seed: int = 1) -> torch.Tensor:
        """``[rows, tokens]`` random token ids on the device."""
        return models.prompt_ids(self.vocab_size, tokens, rows=rows, device=self.device, seed=seed)

    def finish_part(self, name: str, result: dict[str, Any]) -> None:
        """Put a part into the record and write the file, so that a later crash loses nothing."""
        self.record["parts"][name] = result
        record.write(self.record, self.path)


def say(message: str) -> None:
    """Print progress at once: the log of a run that was cut short must show how far it came."""
    print(message, file=sys.stderr, flush=True)


def build_folder() -> Path:
    """The ignored folder ``build`` of the checkout, or of the working directory."""
    root = Path(__file__).resolve().parents[2]
    return (root if (root / "pyproject.toml").is_file() else Path.cwd()) / "build"


def default_path(name: str, parts: list[str], device: torch.device) -> Path:
    """``build/records/<device>-<model>-<parts>.json``: a record is kept by moving it."""
    kind = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).split()[-1].lower()
    return build_folder() / "records" / f"{kind}-{name}-{'-'.join(parts)}.json"


def open_session(options: argparse.Namespace) -> Session:
    """Build the model and begin the record."""
    device = torch.device(options.device)
    dtype = DTYPES[options.dtype]
    for name in filter(quantised_peers.is_quantised, options.peers):
        quantised_peers.check(name, device, dtype)
    say(f"building {options.model} ({options.dtype}) on {device}")
    model = load_host(options.model, device=device, dtype=dtype)
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "commit")}
    name = "+".join(options.parts)
    begun = record.start(name, device, settings=settings, commit_id=options.commit)
    begun["model"] = dict(
        name=options.model,
        parameters=sum(p.numel() for p in model.parameters()),
        **dataclasses.asdict(models.traffic(model)),
    )
    if device.type == "cuda":
        begun["environment"]["read_bytes_per_s"] = record.read_bandwidth(device)
        torch.cuda.empty_cache()
    path = (
        Path(options.json) if options.json else default_path(options.model, options.parts, device)
    )
    return Session(options.model, model, models.twin(model), device, options, begun, path)
