"""Loading and calling logits processors."""

import sys

import pytest
import torch

from draftwing.errors import ConfigError, RequestError
from draftwing.requests.logits_processors import apply, load_processors

SOURCE = """
def ban(tokens, logits, params):
    logits[params["token"]] = float("-inf")
    return logits

class Repeat:
    def __call__(self, tokens, logits, params):
        return logits + torch.nn.functional.one_hot(torch.tensor(tokens[-1]), logits.numel()) * 9.0

def wrong(tokens, logits, params):
    return logits[:2]

def broken(tokens, logits, params):
    raise KeyError("x")

number = 3
import torch
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_processors.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield "my_processors"
    sys.modules.pop("my_processors", None)


def test_functions_and_classes(module):
    loaded = load_processors([f"{module}:ban", f"{module}:Repeat"])
    assert set(loaded) == {"ban", "Repeat", f"{module}:ban", f"{module}:Repeat"}
    logits = torch.zeros(4)
    assert apply(loaded["ban"], {"token": 2}, [1], logits.clone()).argmin() == 2
    assert apply(loaded["Repeat"], {}, [1, 3], logits).argmax() == 3


@pytest.mark.parametrize("name", ["nowhere", "no_such_module:f", "my_processors:missing", "my_processors:number", ":f"])
def test_what_cannot_be_loaded(module, name):
    with pytest.raises(ConfigError, match="--logit-processor"):
        load_processors([name])


def test_failing_processors(module):
    loaded = load_processors([f"{module}:wrong", f"{module}:broken"])
    for name in ("wrong", "broken"):
        with pytest.raises(RequestError, match="custom_logit_processor") as error:
            apply(loaded[name], {}, [1], torch.zeros(4))
        assert error.value.param == "custom_logit_processor"


def test_a_processor_has_to_leave_a_token():
    def only(tokens, logits, params):
        return torch.where(torch.arange(4) == params["keep"], logits, params["else"])

    assert apply(only, {"keep": 1, "else": -torch.inf}, [1], torch.zeros(4)).argmax() == 1
    for params in ({"keep": 9, "else": -torch.inf}, {"keep": 1, "else": torch.nan}):
        with pytest.raises(RequestError, match=r"custom_logit_processor: .*left no token"):
            apply(only, params, [1], torch.zeros(4))
