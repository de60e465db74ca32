"""Where Ray is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from draftwing.errors import ConfigError


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "draftwing.serve.ray", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'draftwing\[ray\]'"):
        importlib.import_module("draftwing.serve.ray")
