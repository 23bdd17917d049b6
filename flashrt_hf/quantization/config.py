"""``FlashRTConfig``: which precision a model's linear weights are stored in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from flash_rt.structures.precision.choice import NAMES, checked, wanted
from flash_rt.structures.precision.formats import EIGHT_BITS, QUANTISED

if TYPE_CHECKING:
    from .foreign import Foreign

LAYOUT = 1  # of the stored tensors; the NVFP4 tiles are part of it


class Method(str, Enum):
    """A string for transformers, and a member with a value for diffusers."""

    FLASHRT = "flashrt"


class FlashRTConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """``quantization_config`` of ``from_pretrained``, for transformers and diffusers models.

    Linear layers are quantised as they are read; the model computes through FlashRT's kernels as it
    is, and faster once it is attached. ``save_pretrained`` stores the quantised weights, and
    ``from_pretrained`` of that folder gives the same outputs; ``import flash_rt`` must come before.

    Args:
        precision: ``"fp8"``, ``"int8"``, ``"nvfp4"``, or a dict that maps globs over module paths
            to one of them or to ``"bf16"``, which leaves a layer alone; the last match decides,
            and what none matches is left alone. A projection to the vocabulary keeps 8 bits at
            least, and is left alone where it shares its weight with the embedding.
        modules_to_not_convert: a list of parts of module paths to leave alone.
        layout: version of the stored tensors; written by this class.
        adopted_from: the format that the weights were first stored in, where it was another.
        foreign: the configuration of that format while its tensors are still to be read; see
            ``adopt``.

    Raises:
        ValueError: an unknown precision, or a layout that this version does not know.
        TypeError: ``modules_to_not_convert`` is one text.
    """

    def __init__(
        self,
        precision: str | Mapping[str, str] = "fp8",
        *,
        modules_to_not_convert: Sequence[str] | None = None,
        layout: int = LAYOUT,
        adopted_from: str | None = None,
        foreign: Mapping[str, Any] | None = None,
        quant_method: str = Method.FLASHRT.value,
    ) -> None:
        names = {precision} if isinstance(precision, str) else {*dict(precision).values()}
        if not names <= {*QUANTISED, "bf16"} or not names & {*QUANTISED}:
            raise ValueError(
                f"FlashRTConfig: precision must be one of {', '.join(QUANTISED)}, or a dict of "
                f"patterns to one of them or 'bf16', got {precision!r}"
            )
        checked(precision)
        if layout != LAYOUT:
            raise ValueError(
                f"FlashRTConfig: layout must be {LAYOUT}, got {layout}; a newer flashrt-hf reads it"
            )
        if quant_method != Method.FLASHRT.value:
            raise ValueError(f"FlashRTConfig: quant_method must be 'flashrt', got {quant_method!r}")
        if isinstance(modules_to_not_convert, str):  # whose letters would be parts of any path
            raise TypeError(
                "FlashRTConfig: modules_to_not_convert must be a list of parts of paths, got "
                f"{modules_to_not_convert!r}"
            )
        self.quant_method = Method.FLASHRT
        self.precision = precision if isinstance(precision, str) else dict(precision)
        self.modules_to_not_convert = [*modules_to_not_convert] if modules_to_not_convert else None
        self.layout = layout
        self.adopted_from = adopted_from
        self.foreign: Foreign | None = None
        if foreign is not None:
            from .foreign import Foreign

            self.foreign = Foreign(foreign)

    def precision_of(self, path: str, *, vocabulary: bool = False) -> str | None:
        """Precision of the linear layer at ``path``; None leaves it alone."""
        name = wanted(checked(self.precision), path)
        if name not in QUANTISED:
            assert name in NAMES
            return None
        return EIGHT_BITS if vocabulary and name == "nvfp4" else name

    def check_patterns(self, paths: Iterable[str]) -> None:
        """Refuse a pattern that matches none of a model's module paths.

        Raises:
            ValueError: the first such pattern.
        """
        if isinstance(self.precision, str):
            return
        known = [*paths]
        for pattern in self.precision:
            if not any(fnmatchcase(path, pattern) for path in known):
                raise ValueError(
                    f"FlashRTConfig: precision has the pattern {pattern!r}, which matches no module"
                )

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` stores."""
        kept: dict[str, Any] = {
            "quant_method": Method.FLASHRT.value,
            "precision": self.precision,
            "modules_to_not_convert": self.modules_to_not_convert,
            "layout": self.layout,
            "adopted_from": self.adopted_from,
        }
        if self.foreign is not None:
            kept["foreign"] = dict(self.foreign.config)
        return kept

    def __iter__(self) -> Any:
        yield from self.to_dict().items()
