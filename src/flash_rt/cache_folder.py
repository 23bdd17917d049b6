"""The seam between structures, which cache what they measured, and flashrt_hf, which has settings.

structures may not import flashrt_hf, so importing ``flash_rt`` puts the setting's reader here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def user_cache() -> Path:
    """``flash_rt`` in the user's own cache folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "flash_rt"


get: Callable[[], Path] = user_cache
