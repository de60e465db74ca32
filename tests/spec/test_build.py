"""What a drafter cannot work with is refused by name when it is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.spec.build import ngram, suffix


@pytest.mark.parametrize(("build", "name", "most"), [(ngram, "NGRAM", 2**22 - 2), (suffix, "SUFFIX", 2**22)])
def test_a_vocabulary_that_lookups_cannot_pack(build: Any, name: str, most: int) -> None:
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=most + 1))
    context = SimpleNamespace(options=Options(speculative_algorithm=name), target=target)
    with pytest.raises(ConfigError, match=f"{name}.*{most}.*{most + 1}"):
        build(context)
