"""How one server behaves; read once from the command line."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        name: what ``/v1/models`` calls the model; requests must name it.
        host, port: where it listens.
        api_keys: keys that open it; none means that everybody who reaches it may use it.
        anonymous: allows an address beyond loopback without a key.
        max_queue: sequences that wait at most; more are answered with 429.
        max_choices: largest ``n``.
        request_timeout_s: from the arrival of a request to its last token.
        grace_s: how long running requests may go on after SIGTERM; the process ends at most two
            seconds later.
        max_body_bytes: largest request body.
        body_timeout_s: how long a client may take to send its request.
        stall_timeout_s: how long a client may leave a full send buffer unread.
        prefix_reuse: whether the next turn of a conversation computes its own tokens only, which is
            as exact as computing all of them, and not the same bits.
        image_urls: whether images are fetched from public http(s) addresses.
        max_images, max_image_pixels: per request, per image.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    anonymous: bool = False
    max_queue: int = 64
    max_choices: int = 8
    request_timeout_s: float = 600.0
    grace_s: float = 30.0
    max_body_bytes: int = 4 * MIB
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    prefix_reuse: bool = True
    image_urls: bool = False
    max_images: int = 8
    max_image_pixels: int = 50_000_000

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ValueError: a value out of its range, or an open address without a key.
        """
        positive = ("max_queue", "max_choices", "request_timeout_s", "grace_s", "max_body_bytes")
        for name in (*positive, "body_timeout_s", "stall_timeout_s", "max_image_pixels"):
            if not getattr(self, name) > 0:
                raise ValueError(f"serve: {name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"serve: port must be 0 to 65535, got {self.port}")
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise ValueError("serve: api_key must be printable ASCII and not empty")
        if not (self.loopback or self.api_keys or self.anonymous):
            raise ValueError(
                f"serve: host {self.host!r} is reachable from other machines and needs an api_key; "
                "pass --api-key, or --anonymous to serve everybody who reaches it"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
