from collections.abc import Iterator

import pytest

from draftwing.engine.engine import Engine
from draftwing.train import stages


@pytest.fixture(scope="module", autouse=True)
def little_is_measured() -> Iterator[None]:
    """Each run looks at how fast the machine multiplies and reads; no test here reads what it finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "product_rate", lambda *args: 1e10)
        patch.setattr(Engine, "measure_read_rate", lambda self: 1e10)
        yield
