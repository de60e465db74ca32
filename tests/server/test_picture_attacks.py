"""What `tools/attacks.py --pictures` sends is refused in words, and others are answered meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked import Attacked, attacked
from attackers import attacking, feel
from picture_attacks import FETCHED, KEY, PICTURES

WORDS = {
    "a PNG that says 30,000 x 30,000": "it has 30000 x 30000 pixels",
    "half of a JPEG": "image file is truncated",
    "a stated body of 100 MB": "the body is larger than",
    "an address of this machine": "cannot be fetched",
    "a redirect to a private address": "its host is in a private network",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[client]\nkey = "right"\n[attacker]\nkey = "{KEY}"\n')
    keys.chmod(0o600)
    options = {"api_key_file": str(keys), "allow_image_urls": ("*",)}
    with attacked(options=options, pause=0.02, pictures=True) as one:
        yield one


@pytest.mark.parametrize("name", WORDS)
def test_refused_in_words(server: Attacked, name: str) -> None:
    attack = (PICTURES | FETCHED)[name]()
    with server.connect() as sock:
        sock.sendall(attack.first or attack.block)
        answer = sock.makefile("rb")
        while line := answer.readline().strip():
            if line.lower().startswith(b"content-length"):
                size = int(line.split(b":")[1])
        assert WORDS[name] in json.loads(answer.read(size))["error"]["message"]


def test_others_are_answered(server: Attacked) -> None:
    with attacking("a mutated WebP", server.port, 20, 8):
        felt = feel(server.port, 0.7, "right")
    assert len(felt.gaps) > 2 and max(felt.health) < 5
