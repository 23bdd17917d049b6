"""``flash-rt generate MODEL PROMPT``: a greedy answer, streamed, from the captured decode loop."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from ..host import MODEL_HELP, load_host, load_tokenizer
from . import DEVICE_HELP, DTYPE_HELP, placement, plain_errors


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    prompt: Annotated[str, typer.Argument(help="the user's message, or - for standard input")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens at most")] = 256,
    max_len: Annotated[
        int, typer.Option(help="tokens that the cache holds", show_default="as needed")
    ] = 0,
    raw: Annotated[bool, typer.Option(help="continue the text; no chat template")] = False,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "",
) -> None:
    """Answer a prompt greedily."""
    from transformers import TextStreamer

    from flash_rt import structures

    place, kind = placement(device, dtype)
    with plain_errors():
        tokenizer = load_tokenizer(model)
    text = sys.stdin.read() if prompt == "-" else prompt
    if raw or not tokenizer.chat_template:
        encoded = tokenizer(text, return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    ids = encoded["input_ids"].to(place)
    with plain_errors():
        host = load_host(model, device=place, dtype=kind)
        start = time.perf_counter()
        print(f"attaching to {model} on {place} ...", file=sys.stderr, flush=True)
        structures.attach(host, host.forward)
        loop = structures.decode_loop(host, max_len=max_len or ids.shape[1] + max_new_tokens)
        seconds = time.perf_counter() - start
        print(f"attached in {seconds:.1f} s", file=sys.stderr, flush=True)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        loop.generate(ids, max_new_tokens=max_new_tokens, streamer=streamer)
