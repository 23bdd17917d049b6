"""``flash-rt serve MODEL``: an OpenAI-compatible server in front of one model."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Annotated

import typer

from ..host import MODEL_HELP
from ..settings import API_KEY
from . import DEVICE_HELP, DTYPE_HELP, PRECISION_HELP, placement, plain_errors

MODULES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"opens the server; may be repeated; default: ${API_KEY.name}"),
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="no key though other machines reach the address")
    ] = False,
    name: Annotated[str, typer.Option(help="what requests call the model; default: MODEL")] = "",
    max_len: Annotated[
        int, typer.Option(help="tokens of prompt and answer; default: the model's, at most 8192")
    ] = 0,
    slots: Annotated[int, typer.Option(help="answers at a time, 1 to 8")] = 8,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "",
    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "auto",
    min_cosine: Annotated[
        float, typer.Option(help="fidelity that a precision must keep; 0 asks for none")
    ] = 0.999,
    kv_cache: Annotated[str, typer.Option(help="fp8, or the model's own")] = "",
    draft: Annotated[
        str, typer.Option(help="lookup: guess from the prompt while one answer runs alone")
    ] = "",
    revision: Annotated[str, typer.Option(help="branch, tag or commit on the Hub")] = "",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python files of the checkpoint")
    ] = False,
    pooling: Annotated[
        str, typer.Option(help="mean, cls or last, of an encoder; default: the checkpoint's")
    ] = "",
    max_queue: Annotated[int, typer.Option(help="prompts that wait; more get 429")] = 64,
    timeout: Annotated[float, typer.Option(help="seconds from request to last token")] = 600.0,
    grace: Annotated[float, typer.Option(help="seconds for running requests at the end")] = 30.0,
    max_body: Annotated[
        float, typer.Option(help="largest request body in MiB; images need room")
    ] = 4.0,
    prefix_reuse: Annotated[
        bool, typer.Option(help="compute only what a conversation's next turn adds")
    ] = True,
    image_urls: Annotated[
        bool, typer.Option("--image-urls", help="fetch images from public web addresses")
    ] = False,
) -> None:
    """Serve a model over HTTP, in OpenAI's wire format."""
    missing = [module for module in MODULES if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"flash-rt: serve needs {', '.join(missing)}; run: pip install 'flashrt-hf[serve]'",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    from ..server.app import Server
    from ..server.config import MIB, ServerConfig
    from ..server.run import check_address, serve
    from ..server.source import load

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    keys = tuple(api_key or ()) or ((API_KEY.get(),) if API_KEY.get() else ())
    with plain_errors():
        config = ServerConfig(
            name=name or model,
            host=host,
            port=port,
            api_keys=tuple(filter(None, keys)),
            anonymous=anonymous,
            max_queue=max_queue,
            request_timeout_s=timeout,
            grace_s=grace,
            max_body_bytes=int(max_body * MIB),
            prefix_reuse=prefix_reuse,
            image_urls=image_urls,
        )
        check_address(config)
        place, kind = placement(device, dtype)
        served = load(
            model,
            name=config.name,
            max_len=max_len or None,
            engine={"slots": slots, "draft": draft or None, "kv_cache": kv_cache or None},
            pooling=pooling or None,
            device=place,
            dtype=kind,
            precision=precision,
            min_cosine=min_cosine or None,
            revision=revision or None,
            trust_remote_code=trust_remote_code,
        )
        server = Server(served, config)
    serve(server)
