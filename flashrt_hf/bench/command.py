"""The arguments of ``flash-rt bench`` and the order of its parts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..host import DTYPES, REAL_MODEL
from . import (
    context,
    decode,
    engine,
    fidelity,
    forward,
    load,
    models,
    record,
    rows,
    serve,
    speculate,
    table,
)
from .peers import PEERS
from .session import Session, build_folder, open_session, say

PARTS: dict[str, Callable[[Session], dict[str, Any]]] = {
    "decode": decode.run,
    "context": context.run,
    "rows": rows.run,
    "engine": engine.run,
    "speculate": speculate.run,
    "forward": forward.run,
    "fidelity": fidelity.run,
}
LOAD = "load"
# What the part load reads; another option beside it would be ignored.
OF_LOAD = frozenset(
    (
        *("parts", "model", "precision", "prompt", "cache", "repeats", "device", "dtype"),
        *("commit", "json", "command"),
    )
)


def parser() -> argparse.ArgumentParser:
    """Build the argument parser; unknown options are errors."""
    made = argparse.ArgumentParser(
        prog="flash-rt bench",
        description="Measure one model; parts run in the order given and share the model.",
        epilog="flash-rt bench serve --help   streaming through HTTP. "
        "flash-rt bench table FILE...   prints records as a Markdown table",
    )
    add = made.add_argument
    add(
        "parts",
        nargs="+",
        choices=[*PARTS, LOAD],
        help="what to measure; load, which starts processes of its own, stands alone",
    )
    add(
        "--model",
        required=True,
        choices=[*models.CONFIGS, REAL_MODEL],
        help="true shape with random weights; smollm2 is a real checkpoint",
    )
    add(
        "--precision",
        nargs="+",
        choices=["auto", "fp8", "int8", "nvfp4"],
        default=["auto"],
        help="one FlashRT entry each (parts decode, rows, fidelity; load takes one); default auto",
    )
    add(
        "--min-cosine",
        type=float,
        help="floor that quantised entries are promoted to; default none, for random weights",
    )
    add(
        "--calibrate",
        type=int,
        default=0,
        metavar="WINDOWS",
        help="windows of text, behind those of the part fidelity, that calibrate its entries",
    )
    add("--peers", nargs="*", choices=PEERS, default=[], help="measured in the same run")
    add("--prompt", type=int, default=128, help="prompt tokens; default %(default)s")
    add("--new", type=int, default=256, help="new tokens; default %(default)s")
    add("--cache", type=int, default=1024, help="tokens of the static cache; default %(default)s")
    add(
        "--cases",
        nargs="+",
        default=["1024:512", "32768:512", "16896:16384"],
        metavar="CACHE:LIVE[:fp8]",
        help="cache and live lengths of the part context, its cache in fp8; default %(default)s",
    )
    add(
        "--rows", type=int, default=4, help="rows of the parts rows and engine; default %(default)s"
    )
    add("--repeats", type=int, default=5, help="rounds, median reported; default %(default)s")
    add("--peer-seconds", type=float, default=30.0, help="a slow candidate leaves after this")
    add("--forced", type=int, default=16, help="tokens fed one by one to the correctness gate")
    add("--forward-steps", type=int, default=40, help="calls a measurement of the part forward")
    add("--windows", type=int, default=8, help="windows of the part fidelity, at most 8")
    add("--window-tokens", type=int, default=544, help="tokens a window")
    add(
        "--text", help="file with the text of the part fidelity; default: this Python's help topics"
    )
    add("--no-gate", action="store_true", help="time even where the correctness gate fails")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default, help="cpu, cuda or cuda:N; default here %(default)s")
    add("--dtype", choices=[*DTYPES], default="bf16", help="default %(default)s")
    add("--compile-backend", default="inductor", help="of the compiled peers; default %(default)s")
    add("--commit", help="recorded where the run is no git checkout")
    add("--json", help="the record's path; default a file in build/records")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``flash-rt bench`` with ``arguments``, default the process's own."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "table":
        _table(arguments[1:])
        return
    if arguments and arguments[0] == "serve":
        asked = serve.parser().parse_args(arguments[1:])
        asked.command = recorded_command(arguments, asked.json)
        _print(*serve.main(asked))
        return
    options = parser().parse_args(arguments)
    options.command = recorded_command(arguments, options.json)
    if LOAD in options.parts:
        if options.parts != [LOAD]:
            parser().error(f"load must be the only part, got {' '.join(options.parts)}")
        if len(options.precision) > 1:
            parser().error(f"load takes one --precision, got {' '.join(options.precision)}")
        plain = parser().parse_args([LOAD, "--model", options.model])
        given = [n for n, v in vars(plain).items() if n not in OF_LOAD and v != vars(options)[n]]
        if given:
            names = " ".join(f"--{name.replace('_', '-')}" for name in given)
            parser().error(f"load must be without {names}, which it does not read")
        _print(*load.main(options))
        return
    if options.prompt + options.new > options.cache:
        parser().error(
            f"--prompt + --new must be at most --cache, got {options.prompt + options.new}"
        )
    _keep_inductor_cache()
    session = open_session(options)
    for part in options.parts:
        session.finish_part(part, PARTS[part](session))
    _print(session.record, session.path)


def _print(measured: dict[str, Any], path: Path) -> None:
    say(f"record: {path}")
    print(table.markdown({path.name: measured}))


def recorded_command(arguments: Sequence[str], json: str | None) -> list[str]:
    """The command as a record keeps it, without the folder that the record was written to."""
    return ["flash-rt", "bench", *(Path(a).name if a == json else a for a in arguments)]


def _table(arguments: Sequence[str]) -> None:
    """``table [--into FILE] [--details FILE] RECORD...``: Markdown, or what is between marks."""
    made = argparse.ArgumentParser(prog="flash-rt bench table")
    made.add_argument("files", nargs="+", type=Path)
    made.add_argument("--into", type=Path, help="the tables go between this file's marks")
    made.add_argument("--details", type=Path, help="all else goes between this file's marks")
    options = made.parse_args(arguments)
    records = {path.name: record.read(path) for path in sorted(options.files)}
    for document, shown in ((options.into, table.summary), (options.details, table.details)):
        if document:
            text = table.fill(document.read_text(encoding="utf-8"), shown(records))
            document.write_text(text, encoding="utf-8")
    if not (options.into or options.details):
        print(table.markdown(records))


def _keep_inductor_cache() -> None:
    """Let Inductor's cache live in the ignored build folder, so that a second run compiles less."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(build_folder() / "inductor"))
