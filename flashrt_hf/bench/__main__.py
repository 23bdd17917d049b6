"""``python -m flash_rt.flashrt_hf.bench``: the same as ``flash-rt bench``, without the command
line's packages.
"""

from __future__ import annotations

from .command import main

if __name__ == "__main__":
    main()
