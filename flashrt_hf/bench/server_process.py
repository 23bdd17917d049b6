"""A server in a process of its own."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

READY = re.compile(r"is served on http://\S+:(\d+)")


class ServerProcess:
    """``flash-rt serve`` in a child process, on a port that it chose.

    Attributes:
        port: where it listens, on loopback.
        lines: what it has said.
    """

    def __init__(self, arguments: Sequence[str], *, patience_s: float = 600.0) -> None:
        """Start, and wait until it listens.

        Raises:
            RuntimeError: it ended, or did not listen in time.
        """
        command = [sys.executable, "-u", "-m", "flash_rt", "serve", *arguments, "--port", "0"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._listens = threading.Event()
        self.port = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listens.wait(patience_s) or not self.port:
            self._process.kill()
            said = "".join(self.lines[-5:]).strip()
            raise RuntimeError(f"server: it must listen within {patience_s:.0f} s, it said: {said}")

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            found = READY.search(line)
            if found:
                self.port = int(found[1])
                self._listens.set()
        self._listens.set()

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds, as the system counts."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * 4096

    def terminate(self, *, patience_s: float) -> tuple[int, float]:
        """SIGTERM; its exit status, and the seconds that it took.

        Raises:
            subprocess.TimeoutExpired: it goes on; it is killed.
        """
        start = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._reader.join()
        return status, time.monotonic() - start

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def server_process(arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """A running server; it is ended on the way out."""
    process = ServerProcess(arguments)
    try:
        yield process
    finally:
        process.close()
