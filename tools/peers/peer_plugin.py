"""A plugin of pytest, in the process that runs the peers' tests: stand-ins for what they import of their own project,
and a limit of time. `tools/peer_suites.py` sets the environment."""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import types
import urllib.request

import pytest

URL, MODEL = os.environ["PEER_URL"], os.environ["PEER_MODEL"]
STUBBED = tuple(os.environ["PEER_STUBS"].split())
LONGEST = 20  # seconds of a test
running = False


class Stub:
    """Stands for anything of the peer's code; a test that calls it is skipped."""

    def __init__(self, name):
        self.__dict__["name"] = name
        self.__dict__["__name__"] = name.rsplit(".")[-1]

    def __getattr__(self, name):
        if name.startswith(("__", "pytest", "_pytest")):
            raise AttributeError(name)
        return Stub(self.name + "." + name)

    def __setattr__(self, name, value):
        pass

    def __call__(self, *args, **kwargs):
        if running:
            pytest.skip("calls " + self.name)
        if len(args) == 1 and isinstance(args[0], (type, types.FunctionType)):
            return args[0]  # a decorator
        return Stub(self.name + "()")

    def __mro_entries__(self, bases):
        return ()

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __getitem__(self, key):
        return Stub(self.name)

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __radd__(self, other):  # options of theirs, at the end of a list
        return other

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __fspath__(self):
        return "/nonexistent"

    def __lt__(self, other):
        return False

    __gt__ = __le__ = __ge__ = __lt__


class StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith(("__", "pytest_")):
            raise AttributeError(name)
        return special(self.__name__, name) or Stub(self.__name__ + "." + name)


@functools.cache
def served_tokenizer():
    import transformers

    with urllib.request.urlopen(URL + "/model_info") as response:
        path = json.load(response)["tokenizer_path"]
    if path == "smollm2":
        from draftwing.models.hub import fetch_default_model

        path = str(fetch_default_model())
    folder, _, name = path.rpartition("/")
    if name.endswith(".gguf"):
        return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return transformers.AutoTokenizer.from_pretrained(path)


def get_tokenizer(*args, **kwargs):
    """The served model's, whatever model a test names. To read it takes none of the test's time."""
    left = signal.alarm(0)
    try:
        return served_tokenizer()
    finally:
        signal.alarm(left)


class RemoteOpenAIServer:
    """In place of vLLM's: the server is there."""

    DUMMY_API_KEY = "none"

    def __init__(self, *args, **kwargs):
        self.url_root = URL
        address = URL.rpartition("//")[2].partition(":")
        self.host, self.port = address[0], int(address[2])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def url_for(self, *parts):
        return URL + "/" + "/".join(parts)

    def get_client(self, **kwargs):
        import openai

        return openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, **({"timeout": 120} | kwargs))

    def get_async_client(self, **kwargs):
        import openai

        return openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, **({"timeout": 120} | kwargs))

    def get_client_anthropic(self, **kwargs):
        import anthropic

        return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, **kwargs)

    def get_async_client_anthropic(self, **kwargs):
        import anthropic

        return anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, **kwargs)


def special(module, name):
    if name == "get_tokenizer":
        return get_tokenizer
    if name == "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH":
        return 60
    if name == "CustomTestCase":
        import unittest

        return unittest.TestCase
    if name == "RemoteOpenAIServer":
        return RemoteOpenAIServer
    if name.isupper() and name.startswith("DEFAULT_") and "MODEL" in name:
        return MODEL
    return None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(name == stub or name.startswith(stub + ".") for stub in STUBBED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())


def late(*_):
    pytest.fail(f"took more than {LONGEST} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    global running
    running = True
    signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        running = False
