"""What a user of transformers gets today: the peers that FlashRT is measured against.

Each peer runs the host's own forward over a ``StaticCache``, in a hand loop that does no more than
it must: one forward a token, the argmax on the device, tokens read once at the end.
(``model.generate`` does more per token and is slower.) The compiled peers compile exactly this
step, forward and argmax together, as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .quantised_peers import MODE, QUANTISED_PEERS, is_quantised, quantised

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPILE_MODES = {"compile": "reduce-overhead", "max-autotune": "max-autotune"}
PEERS = ("eager", *COMPILE_MODES, *QUANTISED_PEERS)


class Runner(Protocol):
    """Something that continues a prompt greedily, without end-of-text."""

    name: str

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """Continue ``ids [B, T]``; returns the new tokens, ``[B, new_tokens]`` int64."""
        ...

    def forced_steps(self, ids: torch.Tensor, continuation: torch.Tensor) -> Iterator[torch.Tensor]:
        """Prefill ``ids [B, T]``, then feed ``continuation [B, N]`` one token a step.

        Yields ``N + 1`` times logits ``[B, V]``: after the prompt and after each fed token. What
        was yielded may be overwritten by the next step.
        """
        ...


class HostRunner:
    """The host's forward over a static cache, eager or compiled.

    Args:
        name: how the table calls it.
        model: the host, with nothing attached.
        cache_tokens: length of the static cache.
        mode: ``torch.compile`` mode of the decode step, None for eager; the prefill is eager.
        backend: backend of ``torch.compile``; the tests use ``"aot_eager"``.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        *,
        cache_tokens: int,
        mode: str | None = None,
        backend: str = "inductor",
    ) -> None:
        self.name = name
        self.model = model
        self._cache_tokens = cache_tokens
        self._cache: Any = None
        self._rows = 0
        self._graphed = mode is not None
        self._step: Callable[[torch.Tensor], torch.Tensor] = self._next_token
        if mode is not None:
            # A backend other than inductor takes no mode.
            self._step = torch.compile(
                self._next_token,
                fullgraph=True,
                backend=backend,
                mode=mode if backend == "inductor" else None,
            )

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, V]`` of the last position; the cache advances by ``ids.shape[1]``."""
        output = self.model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _next_token(self, ids: torch.Tensor) -> torch.Tensor:
        return self._forward(ids).argmax(dim=-1, keepdim=True)

    def _reset(self, rows: int) -> None:
        """Start over: the same buffers for the same batch, so that a compiled step stays valid."""
        from transformers import StaticCache

        if self._cache is None or self._rows != rows:
            self._cache = StaticCache(config=self.model.config, max_cache_len=self._cache_tokens)
            self._rows = rows
        else:
            self._cache.reset()

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """See ``Runner.generate``."""
        self._reset(ids.shape[0])
        tokens = [self._next_token(ids)]
        for _ in range(1, new_tokens):
            if self._graphed:
                torch.compiler.cudagraph_mark_step_begin()
                # The step's output lives in the graph's memory: the next replay overwrites it.
                tokens.append(self._step(tokens[-1]).clone())
            else:
                tokens.append(self._step(tokens[-1]))
        return torch.cat(tokens, dim=1)

    @torch.no_grad()
    def forced_steps(self, ids: torch.Tensor, continuation: torch.Tensor) -> Iterator[torch.Tensor]:
        """See ``Runner.forced_steps``; always the eager forward."""
        self._reset(ids.shape[0])
        yield self._forward(ids)
        for index in range(continuation.shape[1]):
            yield self._forward(continuation[:, index : index + 1])


def make_peer(
    name: str, model: PreTrainedModel, *, cache_tokens: int, backend: str = "inductor"
) -> HostRunner:
    """Build the peer called ``name`` over ``model``.

    Raises:
        ValueError: ``name`` is none of ``PEERS``, or a quantised peer cannot run here.
    """
    if name not in PEERS:
        raise ValueError(f"bench: peer must be one of {', '.join(PEERS)}, got {name!r}")
    mode = COMPILE_MODES.get(name)
    if is_quantised(name):
        model, mode = quantised(name, model), MODE
    return HostRunner(name, model, cache_tokens=cache_tokens, mode=mode, backend=backend)
