from .ops import scale

__all__ = ["scale"]
