"""An engine that is shown pictures, and keeps the requests that it gets."""

from __future__ import annotations

import dataclasses

from fake_engine import FakeEngine
from tiny_tokenizers import byte_level

from draftwing.engine.admission import EngineInfo
from draftwing.images.processing import PatchProcessor
from draftwing.text.tokenizer import Tokenizer

PAD = 257
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|image_pad|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)


class Seeing(FakeEngine):
    info: EngineInfo

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Tokenizer(byte_level("<eos>", "<|image_pad|>"), {"eos_token": "<eos>"}, TEMPLATE)
        processor = PatchProcessor(PAD, "<|image_pad|>", "<|image_pad|>", 8, 8 * 8 * 4, 8 * 8 * 48)
        self.info = dataclasses.replace(self.info, images=processor, vocab_size=PAD + 1)
