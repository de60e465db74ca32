"""More adapters than stay in memory of the host: others are read again from their files, as requests ask for them."""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference.learnable import ENGINE, write_target
from tiny_adapters import write_adapter

from draftwing import LLM, SamplingParams
from draftwing.config.adapters import AdapterCard
from draftwing.core import Output
from draftwing.engine.startup.adapters import AdapterFiles
from draftwing.errors import CheckpointError
from draftwing.models.adapters.adapter import Adapter
from draftwing.requests.request import GenerationRequest

COUNT, MOST, SLOTS = 12, 4, 2
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = [[(7 * i + j) % 250 for j in range(12)] for i in range(5)]
DRAFTERS = {"none": {}, "ngram": {"speculative_algorithm": "NGRAM", "speculative_fixed_shape": True}}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=2, intermediate_size=64)


@pytest.fixture(scope="module")
def adapters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"a{i}", target, i, rank=1 + i % 4) for i in range(COUNT)]


@pytest.fixture
def copies(adapters: Sequence[Path], tmp_path: Path) -> list[Path]:
    """Four of them, whose files may change."""
    return [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in adapters[:4]]


def serving(folders: Sequence[Path], most: int | None = MOST, slots: int = SLOTS) -> dict[str, Any]:
    modules = [f"{folder.name}={folder}" for folder in folders]
    return {**ENGINE, "lora_modules": modules, "max_loras": slots, "max_cpu_loras": most}


def texts_of(llm: LLM, names: Sequence[str | None], prompt: list[int] = PROMPTS[0]) -> list[list[int]]:
    """One after the other."""
    return [llm.generate([prompt], GREEDY, adapter=name)[0].token_ids for name in names]


def request(uid: str, name: str, prompt: list[int] = PROMPTS[0], **params: Any) -> GenerationRequest:
    adapters = ((name, 1.0),) if name else ()
    return GenerationRequest(uid, prompt, SamplingParams(**GREEDY | params), adapters=adapters)


def turned(llm: LLM, until: Callable[[dict[str, list[Output]]], bool]) -> dict[str, list[Output]]:
    """Turns the engine for as long as it takes; outputs by uid."""
    found: dict[str, list[Output]] = {}
    end = time.monotonic() + 60
    while not until(found):
        assert time.monotonic() < end, found
        for output in llm.engine.step():
            found.setdefault(output.uid, []).append(output)
    return found


def ended(found: dict[str, list[Output]], *uids: str) -> bool:
    return all(uid in found and found[uid][-1].finish_reason is not None for uid in uids)


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("most", [1, MOST, 11])
def test_each_text_is_that_of_its_adapter_alone(target: Path, adapters: list[Path], drafter: str, most: int) -> None:
    names = [f"a{i}" for i in range(COUNT)]
    draw = random.Random(most)
    asked = [draw.choice([*names, None]) for _ in range(40)]
    prompts = [PROMPTS[draw.randrange(len(PROMPTS))] for _ in asked]
    params = [{**GREEDY, "temperature": float(i % 2), "sampling_seed": i} for i in range(len(asked))]
    with LLM(str(target), **serving(adapters, None, COUNT)) as llm:
        alone = [
            llm.generate([prompt], one, adapter=name)[0].token_ids
            for prompt, one, name in zip(prompts, params, asked, strict=True)
        ]
        assert llm.engine.stats()["adapter_reads"] == 0
    assert len(set(map(tuple, alone))) > COUNT
    with LLM(str(target), **serving(adapters, most), **DRAFTERS[drafter]) as llm:
        assert llm.engine.stats()["adapters_in_memory"] == most
        for _ in range(2):
            assert [one.token_ids for one in llm.generate(prompts, params, adapter=asked)] == alone
        stats = llm.engine.stats()
        assert stats["adapters"] == COUNT and stats["adapters_on_device"] == SLOTS and stats["waiting"] == 0
        assert stats["adapter_reads"] >= COUNT - most and stats["adapters_in_memory"] <= most + 1
        both = [*set(names)][:SLOTS]  # no slot was lost: two of them run at once
        for uid in both:
            llm.engine.submit(request(uid, uid))
        turned(llm, lambda found: ended(found, *both))


def test_others_go_on_while_one_is_read(target: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without an adapter, and those whose adapter is at hand, however long it takes; who leaves meanwhile is
    not kept waiting."""
    begun, goes_on, read = threading.Event(), threading.Event(), AdapterFiles.again

    def again(self: AdapterFiles, card: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return read(self, card)

    with LLM(str(target), **serving(adapters, 2)) as llm:
        last = f"a{COUNT - 1}"
        first, plain, known = texts_of(llm, ["a0", None, last])
        texts_of(llm, [last, f"a{COUNT - 2}"])  # which have the slots
        monkeypatch.setattr(AdapterFiles, "again", again)
        monkeypatch.setattr("draftwing.engine.adapters.PATIENCE", 0.05)
        for uid in ("reads", "leaves"):
            llm.engine.submit(request(uid, "a1" if uid == "leaves" else "a0"))
        turned(llm, lambda _: begun.is_set())
        time.sleep(0.1)  # longer than it may wait for a slot
        for uid, name in (("plain", ""), ("known", last)):
            llm.engine.submit(request(uid, name))
        llm.engine.abort("leaves")
        found = turned(llm, lambda found: ended(found, "plain", "known", "leaves"))
        assert tokens(found["plain"]) == plain and tokens(found["known"]) == known and "reads" not in found
        assert llm.engine.stats()["waiting"] == 1 and not llm.engine.idle()
        begin = time.monotonic()
        assert not llm.engine.step(), "nothing to do"
        assert time.monotonic() - begin > 0.1, "and no processor is kept busy with it"
        goes_on.set()
        assert tokens(turned(llm, lambda found: ended(found, "reads"))["reads"]) == first
        assert llm.engine.idle()


def test_a_request_that_is_late_does_not_wait_for_a_read(
    target: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, read = threading.Event(), AdapterFiles.again
    with LLM(str(target), **serving(adapters, 1), request_timeout=0.4) as llm:
        expected = texts_of(llm, ["a0", "a1", "a2"])
        monkeypatch.setattr(AdapterFiles, "again", lambda self, card: goes_on.wait(60) and read(self, card))
        llm.engine.submit(request("late", "a0"))
        reason = turned(llm, lambda found: ended(found, "late"))["late"][-1].finish_reason
        assert reason is not None and "timeout" in reason["message"] and llm.engine.idle()
        goes_on.set()
        assert texts_of(llm, ["a0", "a1", "a2"]) == expected


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def one_bit(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-3] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def other_scale(folder: Path) -> None:
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace('"lora_alpha": ', '"lora_alpha": 1'))


def emptied(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def of_another(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "a1", folder)


MORE = (without_weights, other_scale, emptied, of_another)
CHANGES = [removed, truncated, one_bit, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in MORE)]


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_changed_are_not_served(
    target: Path, copies: list[Path], change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the digest that they had: who asks for that name is told what to do. All others go on, and the name does
    where its files are as they were, or when it is loaded again."""
    with LLM(str(target), **serving(copies, None)) as llm:
        expected = texts_of(llm, ["a0", "a1", "a2", "a3"])
    with LLM(str(target), **serving(copies, 1, 1)) as llm:
        assert texts_of(llm, ["a0"]) == expected[:1]
        change(copies[0])
        assert texts_of(llm, ["a0", "a1"]) == expected[:2], "its slot was still filled with it"
        for _ in range(2):
            names = ["a0", "a2", "a0", "a3"]
            for i, name in enumerate(names):
                llm.engine.submit(request(str(i), name))
            with caplog.at_level(logging.ERROR):
                found = turned(llm, lambda found: ended(found, "0", "1", "2", "3"))
            assert [tokens(found[uid]) for uid in ("1", "3")] == [expected[2], expected[3]]
            for uid in ("0", "2"):
                reason = found[uid][-1].finish_reason
                assert reason is not None and reason["status_code"] == 500 and not tokens(found[uid])
                assert "'a0'" in reason["message"] and "load it again" in reason["message"]
                assert str(tmp_path) not in reason["message"], "users are told of no folders"
            assert str(copies[0]) in caplog.text
        stats = llm.engine.stats()
        assert stats["waiting"] == 0 and stats["adapters"] == 4
        shutil.rmtree(copies[0], ignore_errors=True)
        shutil.copytree(tmp_path / "a1" if change is of_another else tmp_path / "a2", copies[0])
        llm.load_adapter("a0", copies[0], replace=True)
        assert texts_of(llm, ["a3", "a0"]) == [expected[3], expected[1 if change is of_another else 2]]


def test_files_that_are_as_they_were_are_served_again(target: Path, copies: list[Path], tmp_path: Path) -> None:
    with LLM(str(target), **serving(copies, 1, 1)) as llm:
        expected = texts_of(llm, ["a0", "a1"])
        copies[0].rename(tmp_path / "elsewhere")
        assert llm.generate([PROMPTS[0]], GREEDY, adapter="a0")[0].finish_reason["type"] == "abort"
        (tmp_path / "elsewhere").rename(copies[0])
        assert texts_of(llm, ["a0", "a1"]) == expected


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(24, "Too many open files"), CheckpointError("torn")])
def test_what_could_not_be_read_for_a_while_is_read_when_it_can(
    target: Path, copies: list[Path], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only files that are at fault are to be loaded again; whoever asks once more has the adapter."""
    again, wrong = AdapterFiles.again, [error] * (4 if isinstance(error, CheckpointError) else 2)  # it is tried twice

    def sometimes(self: AdapterFiles, card: AdapterCard) -> Adapter:
        if wrong:
            raise wrong.pop()
        return again(self, card)

    with LLM(str(target), **serving(copies, 1, 1)) as llm:
        expected = texts_of(llm, ["a0", "a1"])
        monkeypatch.setattr(AdapterFiles, "again", sometimes)
        for _ in range(2):
            reason = llm.generate([PROMPTS[0]], GREEDY, adapter="a0")[0].finish_reason
            assert reason["type"] == "abort" and "'a0'" in reason["message"]
            assert ("load it again" in reason["message"]) == isinstance(error, CheckpointError)
        assert texts_of(llm, ["a0", "a1"]) == expected


def test_the_same_adapter_under_another_name_is_read_from_there(
    target: Path, copies: list[Path], tmp_path: Path
) -> None:
    again = Path(shutil.copytree(copies[0], tmp_path / "again"))
    with LLM(str(target), **serving([*copies[:2], again], 1, 1)) as llm:
        expected = texts_of(llm, ["a0", "a1"])
        shutil.rmtree(copies[0])
        assert texts_of(llm, ["a0", "a1", "again", "a1", "a0"]) == [*expected, *expected, expected[0]]


def test_who_waits_has_the_adapter_that_was_in_memory(target: Path, copies: list[Path]) -> None:
    """Whatever becomes of its name and files, and whoever is loaded meanwhile."""
    with LLM(str(target), **serving(copies, 2, 1)) as llm:
        expected = texts_of(llm, ["a0", "a1", "a2", "a3"])
        texts_of(llm, ["a0", "a1"])  # both are in memory now
        llm.engine.submit(request("runs", "a1", max_new_tokens=40))
        llm.engine.submit(request("waits", "a0"))
        turned(llm, lambda found: "runs" in found)
        llm.unload_adapter("a0")
        shutil.rmtree(copies[0])
        for name in ("a2", "a3"):
            llm.load_adapter(name, copies[int(name[1])])
            llm.engine.submit(request(name, name))
        found = turned(llm, lambda found: ended(found, "runs", "waits", "a2", "a3"))
        assert [tokens(found[uid]) for uid in ("waits", "a2", "a3")] == [expected[0], *expected[2:]]
        assert llm.engine.stats()["adapters"] == 3 and llm.engine.stats()["adapters_in_memory"] <= 2


def test_nobody_waits_for_ever(target: Path, copies: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come for the adapter that has the slot, while another one that waits needs what is in memory."""
    monkeypatch.setattr("draftwing.engine.adapters.PATIENCE", 60)
    with LLM(str(target), **serving(copies, 1, 1)) as llm:
        engine, names = llm.engine, {"first": "a2", "waits": "a0", "behind": "a2"}
        expected = dict(zip(names, texts_of(llm, list(names.values())), strict=True))
        texts_of(llm, ["a1"])
        sent, left, found = 0, set(names), {uid: list[int]() for uid in names}

        def turn() -> None:
            nonlocal sent
            while len(left) < 6:
                sent += 1
                left.add(str(sent))
                engine.submit(request(str(sent), "a1"))
            assert sent < 400
            for output in engine.step():
                found.setdefault(output.uid, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    left.discard(output.uid)

        turn()
        reads = engine.stats()["adapter_reads"]
        engine.submit(request("first", "a2"))
        while engine.stats()["adapter_reads"] == reads:
            turn()
        for uid in ("waits", "behind"):
            engine.submit(request(uid, names[uid]))
        turn()
        engine.abort("first")
        turn()
        monkeypatch.setattr("draftwing.engine.adapters.PATIENCE", 0.05)
        while left & set(names):
            turn()
        assert [found[uid] for uid in ("waits", "behind")] == [expected[uid] for uid in ("waits", "behind")]
        while left:
            for output in engine.step():
                left -= {output.uid} if output.finish_reason is not None else set()
        texts_of(llm, ["a3", "a1"])
        reads = engine.stats()["adapter_reads"]
        assert texts_of(llm, ["a2"]) == [expected["behind"]]
        assert engine.stats()["adapter_reads"] == reads + 1, "who left needs it no more"


def test_several_at_once_are_read_again(target: Path, adapters: list[Path]) -> None:
    """As llama.cpp's requests have them, with scales."""
    asked = [(("a0", 0.5),), (("a1", 1.0), ("a4", 0.5)), (("a2", 2.0), ("a5", -1.0)), (("a0", 0.5), ("a3", 1.0))]

    def answers(llm: LLM) -> list[list[int]]:
        one = [llm._session.prepare([request("", "")._replace(adapters=adapters)])[0] for adapters in asked]
        for answer in one:
            for _ in llm._session.stream([answer]):
                pass
        return [answer.token_ids for answer in one]

    rank = {"max_lora_rank": 8}
    with LLM(str(target), **serving(adapters, None), **rank) as llm:
        expected = answers(llm)
    with LLM(str(target), **serving(adapters, 1, 1), **rank) as llm:
        for _ in range(2):
            assert answers(llm) == expected
            assert llm.engine.stats()["adapters_in_memory"] <= 2
