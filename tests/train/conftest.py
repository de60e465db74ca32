from collections.abc import Iterator

import pytest

from draftwing.train import stages


@pytest.fixture(scope="package", autouse=True)
def little_is_measured() -> Iterator[None]:
    """Each run looks for a second at how fast the machine multiplies; no test here reads what it finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "product_rate", lambda *args: 1e10)
        yield
