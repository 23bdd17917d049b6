"""``flash-rt generate MODEL PROMPT``: an answer, streamed, from the captured decode loop."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from ..host import MODEL_HELP, load_handle
from . import DEVICE_HELP, DTYPE_HELP, PRECISION_HELP, placement, plain_errors

GREEDY = "default: the likeliest token, no drawing"


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[str, typer.Argument(help="the user's message, or - for standard input")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens at most")] = 256,
    max_len: Annotated[
        int, typer.Option(help="tokens that the cache holds", show_default="as needed")
    ] = 0,
    raw: Annotated[bool, typer.Option(help="continue the text; no chat template")] = False,
    temperature: Annotated[float | None, typer.Option(min=0, help=GREEDY)] = None,
    top_k: Annotated[int | None, typer.Option(help="draw from the k likeliest")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="draw from the likeliest that reach p")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="of the draws; default: another each time")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends the answer")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="lookup: repeats of the text are drafted, the answer is the same"),
    ] = None,
    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "auto",
    min_cosine: Annotated[
        float, typer.Option(min=0, max=1, help="floor of its fidelity; 0 measures nothing")
    ] = 0.999,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "",
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the Hub")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the checkpoint's own Python")
    ] = False,
) -> None:
    """Answer a prompt."""
    place, kind = placement(device, dtype)
    text = sys.stdin.read() if prompt == "-" else prompt
    drawing = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    with plain_errors():
        start = time.perf_counter()
        print(f"loading and attaching {model} on {place} ...", file=sys.stderr, flush=True)
        handle = load_handle(
            model,
            device=place,
            dtype=kind,
            precision=precision,
            min_cosine=min_cosine or None,
            max_len=max_len or None,
            draft=draft,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        seconds = time.perf_counter() - start
        print(f"ready after {seconds:.1f} s", file=sys.stderr, flush=True)
        with handle:
            if not hasattr(handle, "stream"):
                raise ValueError(
                    f"generate: model must generate text, got {type(handle.model).__name__}"
                )
            pieces = handle.stream(
                text, max_new_tokens=max_new_tokens, stop=stop or (), raw=raw, **drawing
            )
            for piece in pieces:
                print(piece, end="", flush=True)
    print()
