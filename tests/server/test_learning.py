"""A server that follows its folder of heads: what is swapped, when a process trains, and what is shown of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moe_models
import pytest
from fake_engine import EOS, FakeEngine
from gguf import GGMLQuantizationType as Type
from hybrid_gguf import write
from hybrid_models import layer_weights, reference, with_layer
from scripted import client_of, keys_file, wait_until
from starlette.testclient import TestClient

from draftwing.config.adapters import AdapterCard, AdapterPath, adapter_paths
from draftwing.config.options import Options
from draftwing.errors import ConfigError, DraftwingError
from draftwing.files import lock_file
from draftwing.learn import history as history_module
from draftwing.learn.history import HeadHistory
from draftwing.learn.idle import COSTS
from draftwing.learn.live import ENOUGH
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.server import learning
from draftwing.server import learning as module
from draftwing.server.learning import Learning, arguments


class Engine:
    """Remembers which folders it was given."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"learn": str(folder), "speculative_draft_model_path": "first", **options}
        self.info = SimpleNamespace(options=Options.from_kwargs(**options), head_rank=8)
        self.adapters = dict[str, AdapterCard]()
        self.link, self.active, self.swapped, self.refusal = object(), 0, list[str](), dict[str, str]()

    async def swap_draft(self, folder: Path | None, adapter: str = "") -> str | None:
        name = ("first" if folder is None else folder.name) + (f" of {adapter}" if adapter else "")
        self.swapped.append(name)
        return self.refusal.get(name)

    async def stats(self) -> dict[str, Any]:
        return {"chain_seconds": [0.01, 0.02]}


class Training:
    """Stands for `IdleTraining`."""

    def __init__(self) -> None:
        self.calls, self.active, self.wanted = list[str](), False, True
        self.whose: str | None = None  # is being trained
        self.run: str | None = None  # is there to go on with
        self.chosen: str | None = ""  # has enough that is new

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> bool:
            self.calls.append(name)
            return self.wanted

        return call

    def left(self) -> str | None:
        return self.run

    def next(self, whose: list[str]) -> str | None:
        return self.chosen if self.chosen in whose else None

    def drop(self) -> None:
        self.calls.append("drop")
        self.run = self.whose = None

    def start(self, whose: str, more: list[str]) -> None:
        self.calls.append(" ".join(("start", *([whose] if whose else []), *more)))


def looked(learning: Learning, times: int = 1) -> None:
    async def looks() -> None:
        for _ in range(times):
            await learning._look()

    asyncio.run(looks())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@pytest.fixture
def history(tmp_path: Path) -> HeadHistory:
    history, head = HeadHistory(tmp_path / "heads"), tmp_path / "made"
    head.mkdir()
    (head / "config.json").write_text("{}")
    for parent in (None, 1):
        history.add(head, {"parent": parent})
    return history


def requests(learning: Learning, accepted: int, client: str = "", adapter: str = "") -> None:
    """adapter: name of one, of this digest."""
    request = SimpleNamespace(client=client, adapters=((adapter, 1.0),) if adapter else (), adapter_digest=adapter)
    for i in range(ENOUGH):
        meta = {"spec_num_correct_drafts": accepted + i % 3, "spec_verify_ct": 10}
        learning.finished(SimpleNamespace(meta=meta, request=request))  # type: ignore[arg-type]


def test_the_head_that_is_named_is_swapped_in_once(tmp_path: Path, history: HeadHistory) -> None:
    engine: Any = Engine(tmp_path)
    learning = Learning(engine, tmp_path)
    looked(learning, 2)
    expected = {"draft_head": {"0": 1}, "head_swaps": 0, "training": 0, "client_length": {}}
    assert engine.swapped == [] and learning.numbers() == expected
    history.use(2)
    looked(learning, 2)
    expected |= {"draft_head": {"2": 1}, "head_swaps": 1}
    assert engine.swapped == ["2"] and learning.numbers() == expected
    assert learning.draft_model_path == str(tmp_path / "heads" / "2")
    history.use(None)
    looked(learning, 2)
    assert engine.swapped == ["2", "first"] and learning.draft_model_path == "first"
    assert [head for _, head in learning.facts()["swaps"]] == [2, None]


def test_acceptance_of_each_key_is_shown_to_whoever_has_one(tmp_path: Path, history: HeadHistory) -> None:
    engine: Any = Engine(tmp_path)
    learning = Learning(engine, tmp_path)
    requests(learning, 5, "alice")
    requests(learning, 5)
    history.use(2)
    looked(learning, 2)
    assert learning.numbers()["client_length"] == {}, "those were of the head before"
    for client, accepted in (("alice", 10), ("bob", 4), ("", 0)):
        requests(learning, accepted, client)
    expected = {"alice": 1 + 10.98 / 10, "bob": 1 + 4.98 / 10}  # of 50 requests, i % 3 accepted drafts more
    assert learning.numbers()["client_length"] == pytest.approx(expected, abs=0.002)
    assert learning.facts()["clients"] == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize("endpoints", ["metrics", "all", "docs", "none"])
def test_metrics_without_a_key_name_nobody(tmp_path: Path, history: HeadHistory, endpoints: str) -> None:
    """Neither clients nor adapters, which other routes name to who has a key."""
    engine: Any = Engine(tmp_path, public_endpoints=endpoints)
    learning = Learning(engine, tmp_path)
    adapters(engine, secret="d1")
    looked(learning)
    requests(learning, 5, "alice")
    requests(learning, 5, "alice", "d1")
    found = repr(learning.numbers())
    assert ("alice" in found) == ("secret" in found) == (endpoints in ("docs", "none"))


def test_server_info_names_the_head_that_drafts(
    tmp_path: Path, history: HeadHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLLOW_SECONDS", 0.001)
    options = Options(learn=str(tmp_path), speculative_algorithm="EAGLE3", speculative_draft_model_path="first")
    with client_of(FakeEngine(options)) as client:
        assert client.get("/server_info").json()["speculative_draft_model_path"] == "first"
        history.use(2)
        wait_until(lambda: client.get("/server_info").json()["speculative_draft_model_path"].endswith("heads/2"))


def after_a_second_head(engine: Any, folder: Path, history: HeadHistory) -> Learning:
    """One whose first head has served some requests, and whose second serves now."""
    learning = Learning(engine, folder)
    history.use(1)
    looked(learning)
    requests(learning, 10)
    history.use(2)
    looked(learning)
    return learning


def test_a_head_that_is_refused_is_not_tried_again_and_another_is(tmp_path: Path, history: HeadHistory) -> None:
    engine: Any = Engine(tmp_path)
    engine.refusal["2"] = "restart with it"
    learning = Learning(engine, tmp_path)
    history.use(2)
    looked(learning, 3)
    assert engine.swapped == ["2"] and learning.model.head is None
    history.use(1)
    looked(learning, 2)
    assert engine.swapped == ["2", "1"] and learning.model.head == 1


def test_it_is_swapped_back_where_live_requests_say_so(tmp_path: Path, history: HeadHistory) -> None:
    engine: Any = Engine(tmp_path)
    learning = after_a_second_head(engine, tmp_path, history)
    requests(learning, 10)
    looked(learning, 2)
    assert engine.swapped == ["1", "2"]
    for _ in range(4):
        requests(learning, 2)
    looked(learning, 2)
    assert engine.swapped == ["1", "2", "1"] and history.current() == 1, "the parent"
    for _ in range(4):  # harder requests say nothing of a head that was there before
        requests(learning, 0)
    looked(learning, 2)
    assert engine.swapped == ["1", "2", "1"]
    assert len(learning.facts()["curve"]) in (1, 2)


def test_it_is_swapped_back_when_a_process_that_holds_the_folder_goes_on(
    tmp_path: Path, history: HeadHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "LOCK_SECONDS", 0.05)
    learning = Learning(Engine(tmp_path), tmp_path)  # type: ignore[arg-type]
    requests(learning, 10)
    history.use(1)
    looked(learning)
    for _ in range(4):
        requests(learning, 2)
    with lock_file(history.folder / "lock"), pytest.raises(DraftwingError):
        looked(learning)
    assert learning.model.head == 1
    looked(learning, 3)
    assert learning.model.head is None


@pytest.mark.parametrize("gone", ["removed", "damaged", "refused"])
def test_the_first_head_is_swapped_in_where_the_parent_is_gone(
    tmp_path: Path, history: HeadHistory, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = Engine(tmp_path)
    learning = after_a_second_head(engine, tmp_path, history)
    if gone == "removed":
        history.remove(1)
    elif gone == "damaged":
        (history.folder / "1" / "config.json").write_text("{ }")
    else:
        engine.refusal["1"] = "restart with it"
    for _ in range(4):
        requests(learning, 2)
    looked(learning, 5)
    assert engine.swapped[-1] == "first" and learning.model.head is None and history.current() is None
    assert learning.draft_model_path == "first"


def test_a_bad_head_stays_where_there_is_nothing_to_go_back_to(
    tmp_path: Path, history: HeadHistory, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = Engine(tmp_path)
    engine.refusal["first"] = "its folder is gone"
    learning = Learning(engine, tmp_path)
    requests(learning, 10)
    history.use(1)
    looked(learning)
    for _ in range(4):
        requests(learning, 2)
    looked(learning, 3)
    said = len(caplog.records)
    looked(learning, 9)
    assert learning.model.head == 1 and engine.swapped == ["1", "first"] and len(caplog.records) == said, (
        "it is told once"
    )


def test_training_runs_while_no_request_does(tmp_path: Path) -> None:
    engine, training = Engine(tmp_path), Training()
    learning = Learning(engine, tmp_path, training)  # type: ignore[arg-type]
    engine.active = 1
    learning.began(SimpleNamespace())  # type: ignore[arg-type]
    assert training.calls == ["busy"]
    training.wanted = False
    looked(learning)
    assert "busy" in training.calls[1:] and "start --init-head first" not in training.calls
    engine.active, training.wanted = 0, True
    looked(learning)
    assert training.calls[-1] == "start --init-head first" and (tmp_path / COSTS).read_text().split() == [
        "[",
        "0.01,",
        "0.02",
        "]",
    ]


def test_a_loop_that_is_cancelled_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLLOW_SECONDS", 0.001)
    training = Training()
    learning = Learning(Engine(tmp_path), tmp_path, training)  # type: ignore[arg-type]

    async def work() -> None:
        task = asyncio.create_task(learning.run())
        async with asyncio.timeout(60):
            while training.calls.count("look") < 2:
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work())
    assert training.calls[-1] == "close"


def test_what_training_is_told_of_the_model() -> None:
    options = Options.from_kwargs(
        model="/m", device="cpu", speculative_algorithm="NEXTN+NGRAM", speculative_draft_model_path="/h"
    )
    words = arguments(options)
    assert words[words.index("--algorithm") + 1] == "MTP" and words[words.index("--model") + 1] == "/m"
    assert "--dtype" not in words
    words = arguments(Options.from_kwargs(speculative_algorithm="DFLASH", speculative_draft_model_path="/h"))
    assert words[words.index("--algorithm") + 1] == "DFLASH"
    refused = {
        "NGRAM": "found NGRAM",
        "STANDALONE": "NEXTN, found STANDALONE",
    }
    for algorithm, found in refused.items():
        with pytest.raises(ConfigError, match=found):
            arguments(Options.from_kwargs(speculative_algorithm=algorithm))
    with pytest.raises(ConfigError, match="learn_while_idle needs learn"):
        Options.from_kwargs(learn_while_idle=True).resolve()


@pytest.mark.slow
def test_training_begins_with_the_layers_of_a_model_without_a_head(tmp_path: Path) -> None:
    theirs = reference("qwen3.5")
    folder = str(with_layer(tmp_path / "with", theirs, layer_weights(theirs)))
    for algorithm in ("NEXTN", "NEXTN+SUFFIX", "EAGLE"):
        own = Options.from_kwargs(model=folder, speculative_algorithm=algorithm)
        words = arguments(own)
        assert words[words.index("--algorithm") + 1] == "MTP"
        engine: Any = Engine(tmp_path, model=folder, speculative_algorithm=algorithm, speculative_draft_model_path=None)
        assert Learning(engine, tmp_path)._folder_of_model() == folder
    # In a file next to the model's, which EAGLE drafts with, too.
    beside = write(tmp_path / "Q-Q8_0.gguf", theirs.config, dict(theirs.state_dict()), Type.Q8_0)
    both = {**theirs.state_dict(), **layer_weights(theirs)}
    side = write(tmp_path / "mtp-Q-Q8_0.gguf", theirs.config, both, Type.Q8_0, only_mtp=True)
    for algorithm in ("NEXTN", "EAGLE", "EAGLE+NGRAM"):
        asked = Options.from_kwargs(
            model=str(beside), speculative_algorithm=algorithm, speculative_draft_model_path=str(side)
        )
        assert arguments(asked)[:2] == ["--algorithm", "MTP"]
    theirs = moe_models.reference("glm4-moe")
    weights = moe_models.published(theirs, moe_models.predicting(theirs))
    experts = moe_models.with_layer(tmp_path / "experts", theirs, weights)
    with pytest.raises(ConfigError, match="cannot be trained"):
        arguments(Options.from_kwargs(model=str(experts), speculative_algorithm="NEXTN"))


def test_nothing_learns_while_traffic_is_deleted(tmp_path: Path) -> None:
    training = Training()
    learning = Learning(Engine(tmp_path), tmp_path, training)  # type: ignore[arg-type]
    with learning.stopped():
        assert training.calls == ["close"]
        looked(learning, 2)
        assert "start --init-head first" not in training.calls
    looked(learning)
    assert training.calls[-1] == "start --init-head first"


def test_an_engine_that_was_started_anew_keeps_its_head_where_another_was_refused(
    tmp_path: Path, history: HeadHistory
) -> None:
    engine: Any = Engine(tmp_path)
    engine.refusal["2"] = "restart with it"
    learning = Learning(engine, tmp_path)
    for number in (1, 2):
        history.use(number)
        looked(learning, 2)
    engine.link = object()
    looked(learning, 3)
    assert engine.swapped == ["1", "2", "1"] and learning.model.head == 1
    engine.link, engine.refusal["1"] = object(), "damaged meanwhile"
    looked(learning, 3)
    assert engine.swapped == ["1", "2", "1", "1"] and (learning.model.head, learning.draft_model_path) == (
        None,
        "first",
    )


def test_a_damaged_head_is_told_once(
    tmp_path: Path, history: HeadHistory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FOLLOW_SECONDS", 0.001)
    history.use(2)
    (history.folder / "2" / "head.json").write_text("{")
    looks = list[int]()

    class Looked(Engine):
        @property
        def link(self) -> int:
            looks.append(1)
            return 0

        @link.setter
        def link(self, link: object) -> None:
            pass

    async def work() -> None:
        task = asyncio.create_task(Learning(Looked(tmp_path), tmp_path).run())  # type: ignore[arg-type]
        while len(looks) < 9:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work())
    assert len(caplog.records) == 1


def adapters(engine: Any, **digests: str) -> None:
    """Has adapters of these names and digests, and no others."""
    engine.adapters = {name: AdapterCard(name, f"/adapters/{name}", digest, 4, "") for name, digest in digests.items()}


@pytest.fixture
def own_heads(history: HeadHistory, tmp_path: Path) -> dict[str, list[int]]:
    """Numbers of two heads of each of two adapters, the second trained from the first."""
    found: dict[str, list[int]] = {}
    for digest in ("d1", "d2"):
        first = history.add(tmp_path / "made", {"adapter": digest})
        found[digest] = [first, history.add(tmp_path / "made", {"adapter": digest, "parent": first})]
    return found


def test_each_adapter_that_is_loaded_has_its_own_head(
    tmp_path: Path, history: HeadHistory, own_heads: dict[str, list[int]]
) -> None:
    engine: Any = Engine(tmp_path)
    learning = Learning(engine, tmp_path)
    history.use(own_heads["d1"][0], "d1")
    looked(learning, 2)
    assert engine.swapped == [] and "adapter_head" not in learning.numbers(), "it is not loaded"
    adapters(engine, sql="d1", again="d1", other="d2")
    looked(learning, 2)
    assert engine.swapped == ["3 of d1"]
    assert learning.numbers()["adapter_head"] == {("sql", "3"): 1, ("again", "3"): 1, ("other", "0"): 1}
    history.use(2)
    history.use(own_heads["d2"][0], "d2")
    looked(learning, 2)
    assert engine.swapped[1:] == ["2", "5 of d2"] and learning.numbers()["head_swaps"] == 3
    engine.link = object()
    looked(learning, 2)
    assert sorted(engine.swapped[3:]) == ["2", "3 of d1", "5 of d2"], "an engine that was started anew"
    adapters(engine, again="d1", other="changed")
    looked(learning, 2)
    assert engine.swapped[6:] == ["first of d2"], "its files are others now"
    assert learning.numbers()["head_swaps"] == 3, "a counter never falls"
    adapters(engine, again="d1", other="d2")
    looked(learning, 2)
    assert engine.swapped[7:] == ["5 of d2"]
    engine.info.head_rank = 0
    adapters(engine, new="d3")
    looked(learning)
    assert "adapter_head" not in learning.numbers()


def test_an_adapters_head_is_swapped_back_by_its_own_requests(
    tmp_path: Path, history: HeadHistory, own_heads: dict[str, list[int]]
) -> None:
    engine: Any = Engine(tmp_path)
    adapters(engine, sql="d1", other="d2")
    learning = Learning(engine, tmp_path)
    first, second = own_heads["d1"]
    for number in (first, second):
        history.use(number, "d1")
        looked(learning, 2)
        requests(learning, 10, adapter="d1")
    for _ in range(4):
        requests(learning, 2)
        requests(learning, 2, adapter="d2")
    looked(learning, 2)
    assert engine.swapped == ["3 of d1", "4 of d1"], "others' requests say nothing"

    def of_sql(accepted: int) -> None:
        request = SimpleNamespace(client="", adapters=(("sql", 1.0),), adapter_digest="d1")
        for i in range(ENOUGH):
            meta = {"spec_num_correct_drafts": accepted + i % 3, "spec_verify_ct": 10}
            learning.finished(SimpleNamespace(meta=meta, request=request))  # type: ignore[arg-type]

    history.use(first, "d1")
    looked(learning)
    of_sql(10)
    history.use(second, "d1")
    looked(learning)
    for _ in range(4):
        of_sql(2)
    looked(learning, 2)
    assert engine.swapped[-1] == "3 of d1" and history.current("d1") == first and history.current() is None
    assert [name for name, *_ in learning.facts()["adapters"]] == ["sql", "other"]


def test_a_head_that_cannot_be_read_stops_nobody_elses(
    tmp_path: Path, history: HeadHistory, own_heads: dict[str, list[int]]
) -> None:
    engine: Any = Engine(tmp_path)
    adapters(engine, sql="d1", other="d2")
    learning = Learning(engine, tmp_path)
    for digest, (first, _) in own_heads.items():
        history.use(first, digest)
    (history.folder / str(own_heads["d1"][0]) / "head.json").write_text("{")
    engine.refusal["2"] = "restart with it"
    history.use(2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be read"):
            looked(learning)
    assert sorted(engine.swapped) == ["2", "5 of d2"]


def test_training_is_told_of_the_adapter_whose_turn_it_is(tmp_path: Path, history: HeadHistory) -> None:
    engine, training = Engine(tmp_path), Training()
    path = tmp_path / "an adapter=1"
    engine.adapters = {"sql": AdapterCard("sql", str(path), "d1", 4, "")}
    learning = Learning(engine, tmp_path, training)  # type: ignore[arg-type]
    training.chosen = "d1"
    looked(learning)
    given = json.dumps({"name": "sql", "path": str(path)})
    words = f"start d1 --init-head first --adapter {given} --head-rank 8 --init-factors"
    assert training.calls[-1] == f"{words} none"
    (path / "draft_head").mkdir(parents=True)
    looked(learning)
    assert training.calls[-1] == f"{words} {path / 'draft_head'}"
    history.use(history.add(tmp_path / "made", {"adapter": "d1"}), "d1")
    looked(learning, 2)
    assert training.calls[-1] == f"{words} {history.folder / '3'}"
    assert adapter_paths([given]) == (AdapterPath("sql", path),), "as it is read"


def test_a_lesson_ends_with_its_adapter(tmp_path: Path) -> None:
    engine, training = Engine(tmp_path), Training()
    adapters(engine, sql="d1", other="d2")
    learning = Learning(engine, tmp_path, training)  # type: ignore[arg-type]
    looked(learning)
    training.whose, training.chosen = "d1", None
    adapters(engine, sql="d1")
    looked(learning)
    assert "drop" not in training.calls
    adapters(engine)
    looked(learning)
    assert training.calls.count("drop") == 1
    training.run = "d1"  # of a server before, which had it
    looked(learning)
    assert training.calls.count("drop") == 2 and not any(call.startswith("start d1") for call in training.calls)
    adapters(engine, sql="d1")
    training.run = "d1"
    looked(learning)
    assert training.calls[-1].startswith("start d1")


KEYS = """
[alice]
key = "sk-alice"
[private]
key = "sk-private"
learn = false
[operator]
key = "sk-operator"
admin = true
"""
USER = [{"role": "user", "content": "what is kept?"}]
CHAT = {"messages": USER, "temperature": 0.5}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "what is kept?"},
    "/v1/messages": {"model": "echo", "max_tokens": 99, "messages": USER},
    "/v1/responses": {"input": "what is kept?"},
    "/generate": {"text": "what is kept?"},
    "/api/chat": {"model": "echo", "messages": USER},
    "/api/generate": {"model": "echo", "prompt": "what is kept?", "stream": False},
}


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[tuple[TestClient, FakeEngine]]:
    engine = FakeEngine(Options(random_seed=7, learn=str(folder), **options))
    with client_of(engine) as client:
        yield client, engine


def kept(folder: Path) -> list[Exchange]:
    """Of a server that has ended."""
    return list(TrafficStore(folder).read())


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


def test_all_dialects_are_kept(tmp_path: Path) -> None:
    began = time.time()
    with serving(tmp_path) as (client, engine):
        for path, body in DIALECTS.items():
            assert client.post(path, json=body).status_code == 200
        assert client.post("/v1/chat/completions", json={**CHAT, "stream": True, "cache_salt": "x"}).status_code == 200
    found = kept(tmp_path)
    # Two of them have the same prompt, and the stand-in's answers are prompts: the others are duplicates.
    expected = {(request.cache_salt, tuple(request.prompt_ids)) for request in engine.requests}
    assert len(engine.requests) == len(DIALECTS) + 1
    assert {(one.salt, tuple(one.prompt)) for one in found} == expected and len(found) == len(expected) >= 3
    assert all(one.answer == [*one.prompt, EOS] and one.client == "anonymous" for one in found)
    assert all(began <= one.at <= time.time() for one in found)
    assert next(one for one in found if one.salt == "x").temperature == 0.5


class Adapting(FakeEngine):
    """Has adapters `a`, `b` and `a2`, which is `a` once more, and any other whose folder has the digest's name."""

    def __init__(self, options: Options, head_rank: int = 8) -> None:
        super().__init__(options)
        cards = tuple(AdapterCard(name, f"/{name}", name[0], 4, "") for name in ("a", "b", "a2"))
        self.info = dataclasses.replace(self.info, adapters=cards, head_rank=head_rank)

    def load_adapter(self, name: str, path: Path, replace: bool = False) -> AdapterCard:
        return AdapterCard(name, str(path), path.name, 4, "")

    def unload_adapter(self, name: str) -> None:
        pass


@pytest.mark.parametrize("head_rank", [8, 0])
def test_answers_of_adapters_are_kept_by_what_they_are(tmp_path: Path, head_rank: int) -> None:
    for name in ("other", "adapters/c"):
        (tmp_path / name).mkdir(parents=True)
    options = Options(
        random_seed=7, learn=str(tmp_path / "learnt"), lora_dir=str(tmp_path / "adapters"),
        api_key_file=keys_file(tmp_path, KEYS),
    )  # fmt: skip
    engine = Adapting(options, head_rank)
    with client_of(engine) as client:

        def ask(text: str, name: str = "alice", **body: Any) -> None:
            assert client.post("/v1/completions", json={"prompt": text, **body}, headers=key(name)).status_code == 200

        ask("by the model")
        ask("by a", model="a")
        ask("by a, too", model="a2")
        ask("by b", model="b")
        ask("not kept", model="a", learn=False)
        ask("nor that", model="a", name="private")
        for lora in ([{"id": 0, "scale": 0.5}], [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 1.0}]):
            ask("of none alone", lora=lora)
        ask("by a, by number", lora=[{"id": 0, "scale": 1.0}])
        load = {"lora_name": "b", "lora_path": "c", "load_inplace": True}
        assert client.post("/v1/load_lora_adapter", json=load, headers=key("operator")).is_success
        ask("by what is b now", model="b")
        metrics = client.get("/metrics", headers=key("alice")).text
    store = TrafficStore(tmp_path / "learnt")
    found = {
        adapter: [engine.tokenizer.decode(one.prompt) for one in store.read(adapter=adapter)]
        for adapter in ("", "a", "b", "c")
    }
    expected: dict[str, list[str]] = {"": ["by the model"], "a": [], "b": [], "c": []}
    if head_rank:
        expected |= {"a": ["by a", "by a, too", "by a, by number"], "b": ["by b"], "c": ["by what is b now"]}
    assert found == expected
    assert ("draftwing:adapter_draft_head{" in metrics) <= (head_rank > 0)
    assert store.delete("alice") == sum(map(len, expected.values()))
    assert not [path for path in (tmp_path / "learnt" / "clients").rglob("*") if path.is_file()]


def test_an_answer_that_began_with_another_adapter_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "c").mkdir(parents=True)
    engine = Adapting(Options(random_seed=7, learn=str(tmp_path / "learnt"), lora_dir=str(tmp_path / "adapters")))
    with client_of(engine) as client:
        engine.pause = 0.02
        body = {"model": "b", "prompt": "x" * 200}
        asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body})
        asking.start()
        wait_until(lambda: bool(engine.requests))
        load = {"lora_name": "b", "lora_path": "c", "load_inplace": True}
        assert client.post("/v1/load_lora_adapter", json=load).is_success
        engine.pause = 0.0
        asking.join()
    store = TrafficStore(tmp_path / "learnt")
    assert [list(store.read(adapter=one)) for one in ("", "b", "c")] == [[], [], []]


def test_who_opts_out_is_not_kept(tmp_path: Path) -> None:
    with serving(tmp_path, api_key_file=keys_file(tmp_path, KEYS)) as (client, engine):
        for path, body in DIALECTS.items():
            for more, headers in (({"learn": False}, key("alice")), ({}, key("private"))):
                assert client.post(path, json=body | more, headers=headers).status_code == 200
            headers = key("alice") | {"X-Draftwing-Learn": "off" if "v1" in path else "0"}
            assert client.post(path, json=body, headers=headers).status_code == 200
        for path in ("/v1/chat/completions", "/v1/responses"):
            assert client.post(path, json=DIALECTS[path] | {"store": False}, headers=key("alice")).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT | {"learn": True}, headers=key("private")).is_success
        # Refused, and aborted.
        assert client.post("/generate", json={"text": "a", "priority": 9}, headers=key("alice")).status_code == 400
        endless = {"text": "abcdef", "rid": "one", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
        engine.pause = 0.02
        asking = threading.Thread(
            target=client.post, args=("/generate",), kwargs={"json": endless, "headers": key("alice")}
        )
        asking.start()
        while not any(request.name == "one" for request in engine.requests):
            time.sleep(0.005)
        assert client.post("/abort_request", json={"rid": "one"}, headers=key("operator")).is_success
        asking.join()
        assert engine.aborted
        engine.pause = 0.0
        assert client.post("/generate", json={"text": "kept"}, headers=key("alice")).is_success
    (only,) = kept(tmp_path)
    assert (only.client, engine.tokenizer.decode(only.prompt)) == ("alice", "kept")


def test_an_operator_deletes_a_client_while_the_server_runs(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    heads = HeadHistory(tmp_path / "learnt" / "heads")
    heads.add(head, {"data": {"clients": {"alice": 3}}})
    with serving(tmp_path / "learnt", api_key_file=keys_file(tmp_path, KEYS)) as (client, engine):
        for name in ("alice", "operator"):
            assert client.post("/generate", json={"text": f"secret of {name}"}, headers=key(name)).is_success
        engine.pause = 0.02  # 13 s in all, until nothing waits for it to run
        sampling = {"max_new_tokens": 1900, "ignore_eos": True}
        slow = {"text": "secret of alice, too", "rid": "slow", "sampling_params": sampling}
        asking = threading.Thread(
            target=client.post, args=("/generate",), kwargs={"json": slow, "headers": key("alice")}
        )
        asking.start()
        while not any(request.name == "slow" for request in engine.requests):
            time.sleep(0.005)
        assert client.post("/delete_traffic", json={"client": "alice"}, headers=key("alice")).status_code == 403
        found = client.post("/delete_traffic", json={"client": "alice"}, headers=key("operator"))
        assert found.json() == {"client": "alice", "exchanges": 1, "heads": [1], "lookups": 2}
        assert engine.forgotten == ["alice"] and engine.running
        engine.pause = 0.0
        asking.join()
        assert client.post("/generate", json={"text": "a new one"}, headers=key("alice")).is_success
    texts = [engine.tokenizer.decode(one.prompt) for one in kept(tmp_path / "learnt")]
    assert texts == ["secret of operator", "a new one"]
    assert heads.get(1).deleted == ("alice",)


def test_without_the_option_nothing_is_kept(tmp_path: Path) -> None:
    engine = FakeEngine()
    with client_of(engine) as client:
        assert client.post("/generate", json={"text": "abcdef", "learn": True}).is_success
        found = client.post("/delete_traffic", json={"client": "anonymous"})
        assert found.json() == {"client": "anonymous", "exchanges": 0, "heads": [], "lookups": 4}
        assert engine.forgotten == ["", "anonymous"], "a key may have this name"


@pytest.mark.parametrize("name", ["", "anonymous"])
def test_requests_without_a_name_are_deleted_by_either(tmp_path: Path, name: str) -> None:
    with serving(tmp_path) as (client, _):
        assert client.post("/generate", json={"text": "secret"}).is_success
        found = client.post("/delete_traffic", json={"client": name}).json()
        assert (found["client"], found["exchanges"]) == ("anonymous", 1)
    assert not kept(tmp_path)


def test_two_servers_need_two_folders(tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(ConfigError, match="another process"), serving(tmp_path):
        pass


def test_a_disk_that_stands_still_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "QUEUED_TOKENS", 10)
    moving, add = threading.Event(), TrafficStore.add

    def slow(store: TrafficStore, exchange: Exchange) -> bool:
        assert moving.wait(20)
        return add(store, exchange)

    monkeypatch.setattr(TrafficStore, "add", slow)
    with serving(tmp_path) as (client, engine):
        for i in range(5):
            assert client.post("/generate", json={"text": f"request {i}"}).is_success
        moving.set()
    assert [engine.tokenizer.decode(one.prompt) for one in kept(tmp_path)] == ["request 0"]
