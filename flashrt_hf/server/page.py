"""The page at ``/``: one file, nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from fastapi.responses import HTMLResponse, Response


@functools.cache
def _page() -> tuple[str, str]:
    text = resources.files(__package__).joinpath("page.html").read_text("utf-8")

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashed = [base64.b64encode(hashlib.sha256(part.encode()).digest()) for part in found]
        return " ".join(f"'sha256-{digest.decode()}'" for digest in hashed)

    policy = (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


async def index() -> Response:
    """The page; only its own script and style run."""
    text, policy = _page()
    return HTMLResponse(
        text, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    )
