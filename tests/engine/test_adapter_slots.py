"""Who gets a slot for an adapter, and when: a request that has waited for long goes first, and no slot is lost."""

from __future__ import annotations

import gc
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.test_adapter_heads import Bench, make_bench, options
from reference.learnable import ENGINE, write_target
from tiny_adapters import mutated, write_adapter

from draftwing import LLM, SamplingParams
from draftwing.config.adapters import AdapterCard
from draftwing.engine import adapters
from draftwing.engine.adapters import PATIENCE, EngineAdapters
from draftwing.errors import CheckpointError
from draftwing.models.adapters.adapter import Adapter
from draftwing.models.adapters.files import CONFIG, WEIGHTS
from draftwing.requests.request import GenerationRequest
from draftwing.sched.own_heads import OwnHeads
from draftwing.sched.req import Req

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


class Waiting:
    """Adapters whose clock is the test's."""

    def __init__(self, names: str, slots: int) -> None:
        self.time, self.runs = 0.0, dict[str, str]()  # of who runs, which adapter
        self.in_slot = dict[int, str]()

        def put(slot: int, adapter: Adapter) -> None:
            assert self.in_slot.get(slot) not in self.runs.values(), "who runs has this slot"
            self.in_slot[slot] = adapter.digest

        self.own = EngineAdapters(slots, 1, put, lambda slot, head: None, lambda asked: 0, lambda: self.time)
        for name in names:
            self.own.add(AdapterCard(name, "", name, 1, ""), Adapter({}, name))

    def arrive(self, uid: str, name: str) -> bool:
        """Whether it runs at once."""
        digest = self.own.hold([(name, 1.0)], uid)
        request = GenerationRequest(uid, [1], SamplingParams(), adapters=((name, 1.0),), adapter_digest=digest)
        req = Req(request, seed=0, max_total=2, stop_ids=frozenset(), salt=0)
        if self.own.enter(req):
            self._run(req)
            return True
        return False

    def end(self, *uids: str) -> None:
        for uid in uids:
            del self.runs[uid]
        self.own.ended({uid: {} for uid in uids})

    def turn(self) -> list[str]:
        """Who runs from now on."""
        found = []
        while (req := self.own.next()) is not None:
            self._run(req)
            found.append(req.uid)
        return found

    def _run(self, req: Req) -> None:
        self.runs[req.uid] = req.request.adapter_digest
        assert self.in_slot[req.adapter] == req.request.adapter_digest


def test_who_has_waited_for_long_goes_first() -> None:
    """Of two adapters and one slot, as of requests of the first one that never end all at once."""
    way = Waiting("ab", 1)
    assert way.arrive("a0", "a") and not way.arrive("b0", "b")
    way.time = 0.75 * PATIENCE
    assert way.arrive("a1", "a") and not way.arrive("b1", "b") and not way.turn()
    way.end("a0")
    way.time = 1.01 * PATIENCE
    assert not way.arrive("a2", "a") and not way.turn(), "who comes later waits behind b0, though its slot is there"
    way.end("a1")
    assert way.turn() == ["b0", "b1"]
    assert way.arrive("b2", "b") and not way.turn(), "a2 has not waited for so long"
    way.time = 2.1 * PATIENCE
    way.end("b0", "b1")
    assert not way.arrive("b3", "b") and not way.turn(), "now it has"
    way.end("b2")
    assert way.turn() == ["a2"]
    way.end("a2")
    assert way.turn() == ["b3"]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_for_ever(seed: int, slots: int) -> None:
    """Requests that are drawn: most want one adapter, each runs for up to 3 s. None gets a slot after one that came
    later and did not have to be late; in the end all have run, and each slot can be had."""
    draw, way = random.Random(seed), Waiting("abcdefgh", slots)
    came, began, ends = dict[str, float](), dict[str, float](), dict[str, float]()
    for number in range(600):
        way.time += draw.expovariate(3.0)
        for uid in [uid for uid in way.runs if ends[uid] <= way.time]:
            way.end(uid)
        begin = way.turn()
        uid = str(number)
        came[uid] = way.time
        late = [one for one in came if one not in began and one not in begin and way.time - came[one] > PATIENCE]
        if way.arrive(uid, "a" if draw.random() < 0.7 else draw.choice("bcdefgh")):
            assert not late, "it went past one that has waited for long"
            begin.append(uid)
        for one in begin:
            began[one], ends[one] = way.time, way.time + draw.uniform(0.1, 3.0)
    while len(began) < len(came):
        way.time += 0.1
        for uid in [uid for uid in way.runs if ends[uid] <= way.time]:
            way.end(uid)
        for one in way.turn():
            began[one], ends[one] = way.time, way.time + 1.0
    assert max(began[uid] - came[uid] for uid in came) > PATIENCE, "nobody had to wait"
    way.end(*way.runs)
    assert len(way.own) == 0 and all(way.arrive(f"last {name}", name) for name in "hgfedcba"[:slots])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model", intermediate_size=64)


@pytest.mark.parametrize("patience", [0.0, 1e9])
def test_requests_without_an_adapter_never_wait(
    target: Path, tmp_path: Path, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine with one slot, while another adapter waits for it; those that have its adapter wait, or do not."""
    monkeypatch.setattr(adapters, "PATIENCE", patience)
    both = [f"{name}={write_adapter(tmp_path / name, target, ord(name))}" for name in "ab"]
    prompts = [[5 + i, 6, 7] for i in range(8)]
    with LLM(str(target), **ENGINE, lora_modules=both, max_loras=1) as llm:
        alone = {
            name: [one.token_ids for one in llm.generate(prompts, GREEDY, adapter=name)] for name in ("a", "b", None)
        }
        asked = ["a", "b", *"aaa", None, "a", None]
        found, ended = [list[int]() for _ in asked], list[int]()
        for turn in range(200):
            if turn < len(asked):
                name = asked[turn]
                given = () if name is None else ((name, 1.0),)
                llm.engine.submit(GenerationRequest(str(turn), prompts[turn], SamplingParams(**GREEDY), adapters=given))
            for output in llm.engine.step() if len(ended) < len(asked) else ():
                found[int(output.uid)] += output.token_ids
                if output.finish_reason is not None:
                    ended.append(int(output.uid))
    assert found == [alone[name][i] for i, name in enumerate(asked)]
    assert (ended.index(1) > ended.index(6)) == (patience > 0), ended
    assert ended.index(5) < ended.index(1) and ended.index(7) < ended.index(1), ended
    assert ended.index(0) == 0


@pytest.mark.slow
@pytest.mark.further(slots=100)
@pytest.mark.further(most=12)
@pytest.mark.parametrize(("slots", "most"), [(8, None), (100, None), (8, 12)])
def test_a_hundred_adapters(target: Path, tmp_path: Path, slots: int, most: int | None) -> None:
    """Each text is that of its adapter alone; what they take does not grow with how often they take turns, and nothing
    is left of those that are unloaded."""
    count = 100
    every = {f"a{i}": write_adapter(tmp_path / f"a{i}", target, i, 1 + i % 3) for i in range(count)}
    prompts = [[5 + i % 7, 6, 7, 8 + i % 5] for i in range(count)]
    params = [{**GREEDY, "temperature": float(i % 2), "sampling_seed": i} for i in range(count)]
    some, alone = range(3, count, 24), {}
    for i in some:
        with LLM(str(target), **ENGINE, lora_modules=[f"x={every[f'a{i}']}"], speculative_algorithm="none") as llm:
            alone[i] = llm.generate(prompts[i], params[i], adapter="x")[0].token_ids
    modules = [f"{name}={path}" for name, path in every.items()]
    given = {"lora_modules": modules, "max_loras": slots, "max_cpu_loras": most, "speculative_algorithm": "NGRAM"}
    others = adapters_in_memory()
    with LLM(str(target), **ENGINE, **given) as llm:
        for turn in range(3):
            found = [one.token_ids for one in llm.generate(prompts, params, adapter=[*every])]
            assert {i: found[i] for i in some} == alone
            stats = llm.engine.stats()
            assert stats["adapters"] == count and stats["adapters_on_device"] == slots
            assert stats["adapters_in_memory"] == (most or count)
            assert adapters_in_memory() - others <= (most or count) + 1
            assert stats["adapter_loads"] >= (count if slots == count else (turn + 1) * (count - slots))
        assert slots < count or stats["adapter_loads"] == count
        for name in every:
            llm.unload_adapter(name)
        assert adapters_in_memory() <= others
    assert len({tuple(text) for text in found}) > 90


def adapters_in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, Adapter) for one in gc.get_objects())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_storm_loses_no_slot(bench: Bench, tmp_path: Path, seed: int) -> None:
    """Adapters with draft heads of their own and without, which are loaded, replaced and unloaded, learn heads, and are
    read again from files, while requests come and some are aborted: each has the text of what its name meant."""
    folders, draw = [], random.Random(seed)
    for i in range(6):
        folders.append(write_adapter(tmp_path / f"a{i}", bench.target, i, 1 + i % 4, strength=0.3))
        if i % 3 == 0:
            shutil.copytree(bench.own / "draft_head", folders[i] / "draft_head")
    folders.append(shutil.copytree(folders[0], tmp_path / "twin", ignore=lambda *_: ["draft_head"]))
    prompts = bench.prompts[:4]
    params = [SamplingParams(**GREEDY | {"temperature": float(i % 2), "sampling_seed": i}) for i in range(4)]
    given: dict[str, Any] = {"lora_dir": str(tmp_path), "max_lora_head_rank": 3, "max_loras": draw.randint(1, 3)}
    alone, plain = dict[Path | None, list[list[int]]](), {"speculative_algorithm": "none"}
    with LLM(**options(bench, **given) | plain | {"speculative_draft_model_path": None}) as llm:
        for folder in (None, *folders):
            if folder is not None:
                llm.load_adapter("x", folder, replace=True)
            name = None if folder is None else "x"
            alone[folder] = [one.token_ids for one in llm.generate(prompts, params, adapter=name)]
    given |= {"max_cpu_loras": draw.choice([None, given["max_loras"]]), "max_total_tokens": draw.choice([200, 2048])}
    with LLM(**options(bench, **given)) as llm:
        engine, named, live, aborted = llm.engine, dict[str, Path](), set[str](), set[str]()
        asked, found = list[tuple[Path | None, int]](), list[list[int]]()
        while len(asked) < 60 or live:
            what, name = draw.random() if len(asked) < 60 else 1.0, draw.choice("uvwx")
            if what < 0.08 and name in named:
                engine.unload_adapter(name)
                del named[name]
            elif what < 0.3:
                named[name] = draw.choice(folders)
                engine.load_adapter(name, named[name], replace=True)
            elif what < 0.75:
                uid, i, folder = str(len(asked)), draw.randrange(4), named.get(name)
                asked.append((folder, i))
                found.append([])
                live.add(uid)
                adapter = () if folder is None else ((name, 1.0),)
                engine.submit(GenerationRequest(uid, prompts[i], params[i], adapters=adapter))
            elif what < 0.8 and live:
                engine.abort(gone := draw.choice(sorted(live)))
                aborted.add(gone)
            elif what < 0.86 and engine.adapters:
                digest = draw.choice(engine.adapters).digest
                engine.swap_draft(draw.choice([None, bench.own / "draft_head"]), digest)
            for output in engine.step() if live else ():
                found[int(output.uid)] += output.token_ids
                if output.finish_reason is not None:
                    live.discard(output.uid)
        for uid, (text, (folder, i)) in enumerate(zip(found, asked, strict=True)):
            whole = alone[folder][i]
            assert text == whole or (str(uid) in aborted and text == whole[: len(text)]), uid
        every = [f"last {i}" for i in range(given["max_loras"])]
        for name, folder in zip(every, folders, strict=False):
            llm.load_adapter(name, folder)
        answers = llm.generate([prompts[0]] * len(every), params[0], adapter=every)
        assert [one.token_ids for one in answers] == [alone[folder][0] for folder in folders[: len(every)]]


# ---- files that are attacks ------------------------------------------------------------------------------------------


def with_other_numbers(data: bytes, header: int, draw: random.Random) -> bytes:
    """Returns a file with some of its factors in other bits, among them the largest numbers that are finite."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 30, 1000])):
        at = header + 4 * draw.randrange((len(data) - header) // 4)
        found[at : at + 4] = draw.choice(
            [b"\xff\xff\x7f\x7f", b"\xff\xff\x7f\xff", b"\0\0\x80\x4b", draw.randbytes(3) + b"\x3f"]
        )
    return bytes(found)


@pytest.mark.parametrize(
    "dtype", ["auto", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("float32", "bfloat16"))]
)
def test_an_adapter_with_the_largest_numbers_harms_nobody_else(target: Path, tmp_path: Path, dtype: str) -> None:
    """Its own requests may end by that its logits are not finite; others have their texts, and so has the next one in
    its slot."""
    plain, own = (write_adapter(tmp_path / name, target, i) for i, name in enumerate(("plain", "own")))
    data, draw = (own / WEIGHTS).read_bytes(), random.Random(1)
    header, names, prompts = 8 + int.from_bytes(data[:8], "little"), ["own", "plain", None], [[5, 6, 7]] * 3
    given = {"lora_modules": [f"plain={plain}", f"own={own}"], "max_loras": 2, "speculative_algorithm": "NGRAM"}
    with LLM(str(target), **ENGINE | {"dtype": dtype}, **given) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, GREEDY, adapter=names)]
        ends = Counter[bool]()
        for _ in range(20):
            (own / WEIGHTS).write_bytes(with_other_numbers(data, header, draw))
            llm.load_adapter("own", own, replace=True)
            first, *others = llm.generate(prompts, GREEDY, adapter=names)
            assert [one.token_ids for one in others] == expected[1:]
            ends["not finite" in str(first.finish_reason)] += 1
        (own / WEIGHTS).write_bytes(data)
        llm.load_adapter("own", own, replace=True)
        assert [one.token_ids for one in llm.generate(prompts, GREEDY, adapter=names)] == expected
    assert ends[True] > 3, ends


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench("EAGLE3", tmp_path_factory.mktemp("bench"), rank=3)


def in_place_of(folder: Path, draw: random.Random) -> None:
    """Something that is no folder of a draft head."""
    shutil.rmtree(folder)
    kind = draw.randrange(6)
    if kind == 0:
        folder.write_bytes(draw.randbytes(30))
    elif kind == 1:
        folder.symlink_to(folder)
    elif kind == 2:
        folder.mkdir()
    elif kind == 3:
        (folder / CONFIG).mkdir(parents=True)
    elif kind == 4:
        folder.mkdir()
        (folder / CONFIG).symlink_to("/dev/zero")
    else:
        folder.mkdir()
        (folder / CONFIG).write_text('{"peft_type": "LORA", "r": 3}')
        (folder / WEIGHTS).symlink_to(folder / CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 5))])
def test_mutated_draft_heads_are_refused_or_change_no_text(
    bench: Bench, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine with two slots: an adapter whose draft head cannot be read is refused in words, and what had its
    name before goes on."""
    monkeypatch.setattr(OwnHeads, "next", lambda self, key: True)
    draw, folder = random.Random(seed), tmp_path / "own"
    shutil.copytree(bench.own, folder)
    head = folder / "draft_head"
    whole = {name: (head / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    header = 8 + int.from_bytes(whole[WEIGHTS][:8], "little")
    kinds = Counter[str]()
    given = {"lora_modules": [f"own={bench.own}", f"plain={bench.plain}"], "max_loras": 2, "max_lora_head_rank": 3}
    with LLM(**options(bench, **given, **({"dtype": "auto"} if seed % 2 else {}))) as llm:

        def texts() -> list[list[int]]:
            found = llm.generate(bench.prompts[:3], GREEDY, adapter=["own", "plain", None])
            return [one.token_ids for one in found]

        expected = texts()
        for i in range(60):
            if i % 10 == 9:
                in_place_of(head, draw)
            else:
                name, data = (*whole.items(),)[i % 2]
                data = mutated(data, draw, header) if i % 4 < 3 else with_other_numbers(data, header, draw)
                (head / name).write_bytes(data)
            try:
                llm.load_adapter("own", folder, replace=True)
                kinds["served"] += 1
            except CheckpointError as error:
                kinds["refused"] += 1
                assert "draft_head" in str(error), error
            if i % 5 == 0:
                assert texts() == expected, i
            if head.is_symlink() or head.is_file():
                head.unlink()
            shutil.rmtree(head, ignore_errors=True)
            head.mkdir()
            for name, data in whole.items():
                (head / name).write_bytes(data)
        llm.load_adapter("own", folder, replace=True)
        assert texts() == expected and min(kinds.values()) > 8, kinds
        assert llm.engine.stats()["adapters"] == 2 and llm.engine.stats()["adapters_on_device"] == 2
        llm.unload_adapter("own")
        for name in ("x", "y"):  # which have both slots
            llm.load_adapter(name, bench.own if name == "x" else bench.plain)
        asked = [("x", "y")[i % 2] for i in range(6)]
        found = [one.token_ids for one in llm.generate(bench.prompts[:3] * 2, GREEDY, adapter=asked)]
        assert found[0] == expected[0] and found[1] == expected[1]
