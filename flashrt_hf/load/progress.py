"""Progress bars of the libraries that load, on or off for one call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flash_rt.structures.progress import watching


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Let transformers, huggingface_hub and attach draw bars on standard error, or hide them.

    Bars that the user has turned off stay off; the libraries' switches are put back afterwards.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    loading, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    if not shown:
        logging.disable_progress_bar()
        disable_progress_bars()

    def bar(items: Sequence[Any], what: str) -> Iterable[Any]:
        made: Iterable[Any] = logging.tqdm(items, desc=what)  # nothing where bars are off
        return made

    try:
        with watching(bar):
            yield
    finally:
        if not shown:
            if loading:
                with warnings.catch_warnings():  # that an environment variable keeps them off
                    warnings.simplefilter("ignore")
                    logging.enable_progress_bar()
            if not downloads:
                disable_progress_bars()
