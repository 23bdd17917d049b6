"""``layer_mapping``: FlashRT's layers in the form that ``kernels.kernelize`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flash_rt.kernel_loader import local_overrides

from .kernels import VERSION

# Layer names that transformers registers, and those that a user may register with
# ``kernels.replace_kernel_forward_from_hub``, with the family that computes each.
LAYERS = {
    "RMSNorm": "norm",
    "RMSNormZeroCentered": "norm",
    "LayerNorm": "norm",
    "SwiGLUMLP": "linear",
    "GeGLUMLP": "linear",
    "Linear": "linear",
    "SiLU": "activation",
    "GeLU": "activation",
    "GeluTanh": "activation",
    "NewGELU": "activation",
    "FastGELU": "activation",
    "QuickGELU": "activation",
}
DEVICES = ("cuda", "cpu")


def layer_mapping(
    *, local: str | Path | None = None, trust_remote_code: bool | list[str] = False
) -> dict[str, dict[str, Any]]:
    """Layer name -> device type -> repository, for ``kernels.use_kernel_mapping``.

    Each layer comes from ``local`` where that is given, else from the entry of LOCAL_KERNELS for
    its family, else from version 1 on the Hub. Nothing is loaded before ``kernelize`` asks for it.

    ``structures.attach`` does not use this: ``kernelize`` matches by layer name only, drops
    foreign hooks, and replaces nothing where transformers refuses the installed ``kernels``.

    Args:
        local: folder with one repository per family, such as ``build/kernels`` of a checkout.
        trust_remote_code: passed on to the repositories on the Hub.

    Raises:
        FileNotFoundError: ``local`` does not hold every family.
        ValueError: an entry of LOCAL_KERNELS is not ``repo_id=path``.
    """
    from kernels import LayerRepository, LocalLayerRepository

    folders = _folders(local)

    def repository(layer: str, family: str) -> Any:
        if family in folders:
            return LocalLayerRepository(folders[family], layer_name=layer)
        return LayerRepository(
            f"flashrt/{family}",
            layer_name=layer,
            version=VERSION,
            trust_remote_code=trust_remote_code,
        )

    return {
        layer: {device: repository(layer, family) for device in DEVICES}
        for layer, family in LAYERS.items()
    }


def _folders(local: str | Path | None) -> dict[str, Path]:
    families = sorted(set(LAYERS.values()))
    if local is not None:
        folders = {family: Path(local) / family for family in families}
        missing = [family for family, folder in folders.items() if not folder.is_dir()]
        if missing:
            raise FileNotFoundError(
                f"layer_mapping: local must hold a folder for each of {families}, but {local} has "
                f"none for {missing}; run `flash-rt kernels build`"
            )
        return folders
    overrides = local_overrides()
    return {f: overrides[f"flashrt/{f}"] for f in families if f"flashrt/{f}" in overrides}
