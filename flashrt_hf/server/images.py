"""Images of messages: data URLs, and web addresses where the server allows those.

A path or any other scheme is never opened. A web address is resolved once, refused when any of its
addresses is not a public one, and fetched from the very address that was checked, without
following redirects and without proxies.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import ipaddress
import re
import socket
import ssl
import warnings
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from .config import ServerConfig
from .errors import ApiError, bad

DATA = re.compile(r"data:image/(png|jpeg|jpg|webp|gif);base64,", re.IGNORECASE)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_FETCHED_BYTES = 20 * 1024 * 1024
FETCH_TIMEOUT_S = 10.0
PARAM = "messages.content.image_url.url"


class Images:
    """Reads the images of requests."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config

    def read(self, urls: Sequence[str]) -> list[Any]:
        """RGB images of PIL.

        Raises:
            ApiError: 400 for too many, for another address than allowed, or for no image.
        """
        if len(urls) > self._config.max_images:
            raise bad(f"At most {self._config.max_images} images, got {len(urls)}", PARAM)
        return [self._decoded(self._bytes(url)) for url in urls]

    def _bytes(self, url: str) -> bytes:
        found = DATA.match(url)
        if found is not None:
            try:
                return base64.b64decode(url[found.end() :], validate=True)
            except (binascii.Error, ValueError):
                raise bad("The data URL of an image must be valid base64", PARAM) from None
        if self._config.image_urls and url.lower().startswith(("http://", "https://")):
            return fetch(url)
        allowed = "data:image/(png|jpeg|webp|gif);base64,..."
        if self._config.image_urls:
            allowed += " or a public http(s) address"
        raise bad(f"An image must be {allowed}, got {url[:60]!r}", PARAM)

    def _decoded(self, data: bytes) -> Any:
        from PIL import Image, UnidentifiedImageError

        limit = self._config.max_image_pixels
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(io.BytesIO(data), formats=FORMATS)
                if image.width * image.height > limit:
                    size = f"{image.width} x {image.height}"
                    raise bad(f"An image must have at most {limit} pixels, got {size}", PARAM)
                return image.convert("RGB")
        except (
            UnidentifiedImageError,
            Image.DecompressionBombError,
            OSError,
            SyntaxError,
            ValueError,
        ):
            raise bad("An image must be a whole PNG, JPEG, WEBP or GIF file", PARAM) from None


def fetch(url: str) -> bytes:
    """The body behind a public web address.

    Raises:
        ApiError: 400, the address is not public, or does not answer with at most
            ``MAX_FETCHED_BYTES``.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _refused(url, "is no web address") from None
    if not host or parts.username is not None or parts.scheme.lower() not in ("http", "https"):
        raise _refused(url, "is no plain web address")
    secure = parts.scheme.lower() == "https"
    port = port or (443 if secure else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = http.client.HTTPConnection(host, port, timeout=FETCH_TIMEOUT_S)
    try:
        plain = socket.create_connection((public_address(host, port), port), FETCH_TIMEOUT_S)
        connection.sock = (
            ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            if secure
            else plain
        )
        connection.request("GET", target, headers={"Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise _refused(url, f"answers with status {answer.status}")
        data = answer.read(MAX_FETCHED_BYTES + 1)
    except (OSError, http.client.HTTPException, UnicodeError):
        raise _refused(url, "cannot be fetched") from None
    finally:
        connection.close()
    if len(data) > MAX_FETCHED_BYTES:
        raise _refused(url, f"has more than {MAX_FETCHED_BYTES} bytes")
    return data


def public_address(host: str, port: int) -> str:
    """The first address of ``host``.

    Raises:
        ApiError: 400, one of its addresses is private, of this machine, or otherwise not public.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _refused(host, "is not known") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_public(address):
            raise _refused(host, "is not a public address")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet at large, also when v6 wraps a v4 one."""
    ip = ipaddress.ip_address(address.split("%")[0])
    inner = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        teredo = ip.teredo or ()
        inner += [v4 for v4 in (ip.ipv4_mapped, ip.sixtofour, *teredo) if v4 is not None]
        if ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return all(each.is_global and not each.is_multicast for each in inner)


def _refused(what: str, why: str) -> ApiError:
    return bad(f"An image address {why}: {what[:100]!r}", PARAM, "invalid_image_url")
