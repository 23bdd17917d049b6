"""The ``flash-rt`` command. A command group or command lives in its own module, named here once."""

from __future__ import annotations

import importlib
import os
import sys

import typer

from flash_rt.flashrt_hf.kernels.compile import BuildError
from flash_rt.flashrt_hf.kernels.manifest import ManifestError
from flash_rt.flashrt_hf.kernels.resolver import KernelNotFoundError
from flash_rt.flashrt_hf.kernels.toolchain import ToolchainError
from flash_rt.flashrt_hf.settings import SettingError
from flash_rt.kernel_loader import LocalKernelsError

# name -> module. The module is imported only when its command is asked for or help is printed; it
# has either ``app``, a typer.Typer with subcommands, or ``command``, one function, with click's
# context settings in ``CONTEXT`` where it needs any.
COMMANDS = {
    "kernels": "flash_rt.flashrt_hf.kernels.cli",
    "explain": "flash_rt.flashrt_hf.commands.explain",
    "generate": "flash_rt.flashrt_hf.commands.generate",
    "serve": "flash_rt.flashrt_hf.commands.serve",
    "bench": "flash_rt.flashrt_hf.commands.bench",
}

EXPECTED = (
    BuildError,
    KernelNotFoundError,
    LocalKernelsError,
    ManifestError,
    OSError,
    SettingError,
    ToolchainError,
)


def build_app(names: list[str]) -> typer.Typer:
    """The command line with the named entries of COMMANDS."""
    app = typer.Typer(
        help="FlashRT: one request, fast.", no_args_is_help=True, pretty_exceptions_enable=False
    )
    app.callback()(lambda: None)
    for name in names:
        module = importlib.import_module(COMMANDS[name])
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name, context_settings=getattr(module, "CONTEXT", None))(module.command)
    return app


def main() -> None:
    """Entry point of the console script: expected errors print one message and exit with 1."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked != "bench":  # which measures the host as it is
        # Read when torch is loaded: threads that spin while they wait make a busy CPU much slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app = build_app([asked] if asked in COMMANDS else list(COMMANDS))
    try:
        app(prog_name="flash-rt")
    except EXPECTED as error:
        print(f"flash-rt: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
