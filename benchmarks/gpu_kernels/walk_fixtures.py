import pytest, torch
@pytest.fixture
def device(): return torch.device("cuda")
@pytest.fixture
def mended_interpreter(): pass
def pytest_configure(config):
    for m in ("further", "exhaustive", "slow"): config.addinivalue_line("markers", m + ": x")
