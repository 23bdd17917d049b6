"""Drafts without a model, found on the device: what followed the last tokens at an earlier place.

A recording searches the text itself, so that a verification can be queued before the host knows the
tokens of the step in front of it.

Source: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .cache import NO_TOKEN, StaticState
from .controls import ADJUSTED, DRAWN, GREEDY
from .depth import MOST, WIDTHS
from .staging import on_device, put

if TYPE_CHECKING:
    from .session import Session

CONTEXT = 8  # tokens that are compared
NEWEST, AGEING = 1000, 0.7  # what equality of the newest counts, and of each before it
# Stand in front of the text: they equal no token, and none of them another, so that a text of fewer
# than CONTEXT tokens agrees with nothing in them.
BEFORE_ALL = tuple(range(-1 - CONTEXT, -1))


def similarity_weights() -> list[int]:
    """``round(NEWEST * AGEING**a)`` for ages from ``CONTEXT - 1`` down to 0.

    The newest alone is enough for a draft. So are older ones without it, together: a copy in which
    a token was replaced goes on behind it.
    """
    return [round(NEWEST * AGEING**age) for age in reversed(range(CONTEXT))]


def search(
    text: torch.Tensor,
    newest: torch.Tensor,
    *,
    weights: torch.Tensor,
    places: torch.Tensor,
    ramp: torch.Tensor,
) -> torch.Tensor:
    """The tokens that may come next, int64 ``[MOST - 1]``; they may run into what they predict.

    Of the places ``1 .. newest`` of the text that one is followed whose ``CONTEXT`` tokens before
    it agree best with the last ones, the latest among equals::

        agreement[i] = sum_a weights[-1 - a] * (text[i - 1 - a] == text[newest - a])
        draft[j] = text[i + j mod (newest + 1 - i)]

    Args:
        text: int64 ``[CONTEXT + S]``, position 0 behind ``BEFORE_ALL``; what lies behind the newest
            token is not looked at.
        newest: int32 ``[1]``, position of the newest token.
        weights: int32 ``[CONTEXT]``, what each agreement counts, the newest last.
        places: int64 ``[S]``, 0, 1, ...; ``ramp``: its first ``MOST - 1``.

    Returns:
        Drafts, ``NO_TOKEN`` each where no place agrees in as much as the newest token.
    """
    slots = places.shape[0]
    last = text.gather(0, newest + 1 + places[:CONTEXT])
    windows = text.unfold(0, CONTEXT, 1)[:slots]
    agreement = ((windows == last) * weights).sum(-1)
    # The place in the lower digits: the latest of those that agree best has the largest key.
    keys = torch.add(places, agreement, alpha=slots).masked_fill_(places > newest, -1)
    best, place = keys.max(0, keepdim=True)
    source = place + ramp.remainder(newest + 1 - place)
    found = text.gather(0, source + CONTEXT)
    return found.masked_fill_(best < NEWEST * slots, NO_TOKEN)


class Repeats:
    """The text of a session's first row on the device, and recordings that draft from it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state: StaticState = session.state.first(1)
        slots, like = self._state.slots, self._state.tokens
        # Generated tokens are scattered whole, behind any prompt.
        self._text = like.new_zeros(CONTEXT + 2 * slots)
        put(self._text[:CONTEXT], BEFORE_ALL)
        self._places = torch.arange(slots, device=like.device)
        self._generated = self._places + CONTEXT
        self._weights = on_device(similarity_weights(), torch.int32, like.device)

    def begin(self, prompt: torch.Tensor) -> None:
        """The first row goes on from ``prompt``, int64 ``[P]`` on any device."""
        self._session.pool.join()
        length = prompt.shape[0]
        put(self._text[CONTEXT : CONTEXT + length], prompt)
        torch.add(self._places, CONTEXT + length, out=self._generated)

    def queue(self, count: int, way: str) -> bool:
        """Find ``count`` drafts and verify them; whether that had been recorded before."""
        return self._session.verifier.run_after(self._draft, "lookup", count + 1, way)

    def warm_up(self) -> None:
        """Record every width and way; what the first row holds is lost."""
        for way in (ADJUSTED, DRAWN, GREEDY):
            for width in reversed(WIDTHS):
                self.queue(width - 1, way)

    def _draft(self, drafts: torch.Tensor) -> None:
        state, slots = self._state, self._places.shape[0]
        self._text.scatter_(0, self._generated, state.tokens[0])
        found = search(
            self._text[: CONTEXT + slots],
            state.lengths,
            weights=self._weights,
            places=self._places,
            ramp=self._places[: MOST - 1],
        )
        drafts.copy_(found[: drafts.shape[0]])

    @property
    def memory_bytes(self) -> int:
        """Buffers beside the session's own."""
        held = (self._text, self._places, self._generated, self._weights)
        return sum(t.numel() * t.element_size() for t in held)
