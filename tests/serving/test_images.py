"""Which images are read, and that nothing else is ever opened."""

from __future__ import annotations

import base64
import http.server
import io
import socket
import threading
from pathlib import Path

import pytest
from PIL import Image

from flash_rt.flashrt_hf.server import images
from flash_rt.flashrt_hf.server.config import ServerConfig
from flash_rt.flashrt_hf.server.errors import ApiError
from flash_rt.flashrt_hf.server.images import Images, is_public


def data_url(kind: str = "png", size: tuple[int, int] = (4, 3)) -> str:
    stream = io.BytesIO()
    Image.new("RGB", size, (255, 0, 0)).save(stream, kind)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def reader(**settings) -> Images:
    return Images(ServerConfig(name="x", **settings))


def test_data_urls():
    for kind in ("png", "jpeg", "webp", "gif"):
        (image,) = reader().read([data_url(kind)])
        assert (image.size, image.mode) == ((4, 3), "RGB")
    red, green, blue = image.getpixel((0, 0))
    assert red > 240
    assert green + blue < 20


@pytest.mark.parametrize(
    "url",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "ftp://example.org/x.png",
        "http://example.org/x.png",
        "https://example.org/x.png",
        "data:text/plain;base64,aGk=",
        "data:image/svg+xml;base64,aGk=",
        "data:image/png;base64,###",
        "data:image/png;base64,aGVsbG8=",
        "",
        "\\\\host\\share",
    ],
)
def test_nothing_else_is_opened(url, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError(f"opened {args}")

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.setattr(Path, "open", never)
    with pytest.raises(ApiError) as caught:
        reader().read([url])
    assert caught.value.status == 400


def test_bombs_and_crowds():
    with pytest.raises(ApiError, match="at most 100 pixels, got 20 x 20"):
        reader(max_image_pixels=100).read([data_url(size=(20, 20))])
    with pytest.raises(ApiError, match="At most 2 images, got 3"):
        reader(max_images=2).read([data_url()] * 3)
    cut = data_url(size=(64, 64))
    with pytest.raises(ApiError, match="whole PNG"):
        reader().read([cut[:-80] + "=" * (-len(cut[:-80].split(",")[1]) % 4)])


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address, public):
    assert is_public(address) is public


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x.png",
        "http://localhost/x.png",
        "http://2130706433/x.png",
        "http://0x7f.1/x.png",
        "http://[::1]/x.png",
        "http://[::ffff:127.0.0.1]/x.png",
        "http://user:pw@8.8.8.8/x.png",
        "http://[bad/x.png",
        "http:///x.png",
        "http://127.0.0.1:99999/x.png",
        "http://\u3002\ud800.example/",
    ],
)
def test_private_addresses_are_not_connected(url, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError(f"connected {args}")

    monkeypatch.setattr(socket, "create_connection", never)
    with pytest.raises(ApiError) as caught:
        reader(image_urls=True).read([url])
    assert caught.value.code == "invalid_image_url"


@pytest.fixture
def site(monkeypatch):
    """A web server of this machine that counts as public; yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            png = base64.b64decode(data_url().split(",")[1])
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/red.png")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png if self.path == "/red.png?x=1" else b"x" * 5000)

        def log_message(self, *args) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(images, "is_public", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(images, "MAX_FETCHED_BYTES", 4000)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_web_image(site):
    (image,) = reader(image_urls=True).read([f"{site}/red.png?x=1"])
    assert image.size == (4, 3)
    with pytest.raises(ApiError, match="status 302"):
        reader(image_urls=True).read([f"{site}/moved"])
    with pytest.raises(ApiError, match="more than 4000 bytes"):
        reader(image_urls=True).read([f"{site}/large"])
