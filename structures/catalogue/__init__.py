"""All structures, widest first: the first whose proof passes wins a region."""

from __future__ import annotations

from .attention import Attention
from .base import Structure
from .decoder_layer import DecoderLayer
from .gated_mlp import GatedMlp
from .layer_norm import LayerNorm
from .linear import Linear
from .mlp import Mlp
from .rms_norm import RmsNorm

CATALOGUE: tuple[Structure, ...] = (
    DecoderLayer(),
    Attention(),
    GatedMlp(),
    Mlp(),
    Linear(),
    RmsNorm(),
    LayerNorm(),
)

__all__ = ["CATALOGUE", "Structure"]
