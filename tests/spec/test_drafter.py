"""A user's own drafter, examples/custom_drafter.py: as a class and by name, in LLM, bench and server."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from reference.learnable import ENGINE, write_target
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import TREE

import draftwing
from draftwing import LLM, ConfigError, Draft, DraftContext, Drafter, DraftStep, SeenTokens
from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.spec.drafter import chain_menu, half_menu, match_menu, tree_menu
from draftwing.utils import launch_server_cmd, terminate_process, wait_for_server

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "red lorry, yellow lorry, red lorry, yellow lorry, red lorry, "
GREEDY = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def plain(model: str) -> list[int]:
    with LLM(model, **ENGINE, speculative_algorithm="none") as llm:
        return llm.generate(PROMPT, GREEDY)[0].token_ids


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("custom_drafter", EXAMPLES / "custom_drafter.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_saves_steps_and_changes_no_text(
    model: str, plain: list[int], example: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"speculative_num_steps": 3, "speculative_fixed_shape": True}  # every step drafts
    with caplog.at_level(logging.INFO), LLM(model, **ENGINE, **tree, speculative_algorithm=example.PairLookup) as llm:
        answers = llm.generate([PROMPT, PROMPT + "red"], [GREEDY, GREEDY | {"temperature": 2.0, "sampling_seed": 1}])
        stats = llm.engine.stats()
        assert llm.engine.info.shape == TreeShape(3, 1, 4)
    assert answers[0].token_ids == plain and len(set(plain)) > 50
    meta = answers[0].meta_info
    assert 1 + meta["spec_num_correct_drafts"] / meta["spec_verify_ct"] > 1.1
    assert "custom_drafter:PairLookup, at most 3 steps" in caplog.text and stats["accept_length"] > 1
    with LLM(model, **ENGINE, speculative_algorithm="none") as llm:
        params = [GREEDY | {"temperature": 2.0, "sampling_seed": 1}, GREEDY]
        sampled, greedy = llm.generate([PROMPT + "red"] * 2, params)
    assert answers[1].token_ids == sampled.token_ids != greedy.token_ids


def test_a_chain_ends_where_nothing_is_known(example: Any) -> None:
    class Slots:
        tokens = torch.tensor(
            [[5, 6, 7, 5, 6, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0], [9, 0, 0, 0, 0, 0, 0]]
        )
        kv_len = torch.tensor([4, 3, 3, 0])
        last = torch.tensor([6, 1, 4, 9])

    rows = torch.arange(4)
    draft = example.PairLookup().propose(DraftStep(Slots(), rows, TreeShape(5, 1, 6), 4, rows[:0]))
    assert draft.tokens[:2].tolist() == [[6, 7, 5, 6, 7, 5], [1, 1, 1, 1, 1, 1]]
    assert draft.alive.sum(1).tolist() == [6, 6, 1, 1] and draft.parent[0].tolist() == [0, 0, 1, 2, 3, 4]
    known = torch.tensor([[True, True, False, True]] * 4)
    draft = example.PairLookup().chain(
        DraftStep(Slots(), rows, TreeShape(6, 2, 8), 4, rows[:0]), torch.full((4, 4), 3), known
    )
    assert draft.alive.sum(1).tolist() == [3] * 4 and draft.tokens.shape == draft.parent.shape == (4, 8)
    assert bool((draft.parent[:, 1:] < torch.arange(1, 8)).all())


@pytest.mark.slow
def test_hidden_states_are_those_of_the_accepted_path(model: str, plain: list[int], example: Any) -> None:
    """A drafter that reads them and keeps no KV: each row's first `count` queries are the tokens that it now has."""
    seen: list[tuple[int, bool]] = []

    class Watching(example.PairLookup):  # type: ignore[misc]
        aux_layers = (0,)  # the embedding

        @classmethod
        def build(cls, context: DraftContext) -> Watching:
            drafter = cls()
            drafter.embed = context.target.embed.weight
            assert (context.rows, context.shape) == (17, TreeShape(2, 1, 3))
            return drafter

        def extend(self, given: SeenTokens) -> None:
            slots, batch, aux_hidden, _, count, _ = given
            aux_hidden = aux_hidden if count is None else aux_hidden.view(len(count), 3, -1)[0, : count[0]]
            ids = [int(torch.cdist(row[None], self.embed).argmin()) for row in aux_hidden]
            start = int(batch.prefix_len[0])
            text = slots.tokens[batch.rows[0], start : start + len(ids)].tolist()
            seen.append((len(ids), ids == text))

    with LLM(
        model, **ENGINE, speculative_algorithm=Watching, speculative_num_steps=2, speculative_fixed_shape=True
    ) as llm:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == plain
    assert all(same for _, same in seen) and {length for length, _ in seen[1:]} > {1, 3}


@pytest.mark.slow
def test_it_reads_no_data(example: Any) -> None:
    """Which a CUDA graph could not capture."""
    with FakeTensorMode():
        slots = SimpleNamespace(
            tokens=torch.zeros(5, 40, dtype=torch.int64),
            kv_len=torch.zeros(5, dtype=torch.int64),
            last=torch.zeros(5, dtype=torch.int64),
        )
        rows = torch.arange(3)
        for bound in (20, 40):  # graphs are captured for any length
            draft = example.PairLookup().propose(DraftStep(slots, rows, TreeShape(3, 1, 4), bound, rows[:0]))
            assert all(part.shape == (3, 4) for part in draft[:3])


@pytest.mark.exhaustive  # a device is found by name in the same way in tests/engine/devices/test_custom.py
def test_by_name_with_the_server(model: str, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine is a process of its own, which imports the class again."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(EXAMPLES), str(Path(draftwing.__file__).parents[1]))))
    process, port = launch_server_cmd(
        f"python -m draftwing.launch_server --model {model} --speculative-algorithm custom_drafter:PairLookup "
        "--speculative-num-steps 4 --speculative-fixed-shape --num-threads 1 --dtype float32 --max-total-tokens 2048 "
        "--log-level error"
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_server(url, timeout=60, process=process)
        answer = httpx.post(f"{url}/generate", json={"text": PROMPT, "sampling_params": GREEDY}, timeout=60).json()
        info = httpx.get(f"{url}/server_info").json()
    finally:
        terminate_process(process)
    assert answer["output_ids"] == plain and answer["meta_info"]["spec_num_correct_drafts"] > 0
    assert info["speculative_algorithm"] == "custom_drafter:PairLookup"
    assert (info["speculative_num_steps"], info["speculative_num_draft_tokens"]) == (4, 5)


class Unfinished(Drafter):
    pass


class Odd(Drafter):
    num_steps = 0

    def propose(self, step: DraftStep) -> Draft:
        raise NotImplementedError


class WithModel(Odd):
    num_steps, topk, num_draft_tokens = 4, 2, 9
    reads_options = ("speculative_draft_model_path",)


class Earlier(Drafter):
    def propose(self, table: Any, rows: Any, shape: Any, max_kv_len: int, noisy: Any) -> Draft:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "nowhere:Drafter",
            "No module named 'nowhere'. Put nowhere.py into the working folder, or its folder on PYTHONPATH",
        ),
        ("json:Drafter", "speculative_algorithm json:Drafter: cannot be loaded: AttributeError"),
        ("json:", "expected module:attribute, found 'json:'"),
        ("json:dumps", "expected a class derived from draftwing.Drafter, found a function"),
        (
            "json:JSONDecoder",
            "expected a class derived from draftwing.Drafter, found the class JSONDecoder, which is not",
        ),
        ("draftwing:Drafter", "the class has to define propose"),
        (Unfinished, "Unfinished: the class has to define propose"),
        (Odd, "num_steps, topk and num_draft_tokens: expected"),
        (Earlier, "Earlier: expected propose(self, step)"),
        (7, "speculative_algorithm must be a str"),
    ],
)
def test_what_is_no_drafter_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Options(speculative_algorithm=asked).resolve()
    assert message in str(refused.value)


class Short(Odd):
    num_steps = 2

    def propose(self, step: DraftStep) -> Draft:
        whole = self.chain(step, step.rows[:, None].expand(-1, 2))
        return whole._replace(parent=whole.parent[:, :2])


class NoDraft(Short):
    def propose(self, step: DraftStep) -> Any:
        return [1, 2]


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Short, r"Short: the drafts of .* must have parent of shape \[1, 3\] and type torch.int64; found \[1, 2\]"),
        (NoDraft, "NoDraft: propose must return a Draft; found list"),
    ],
)
def test_a_wrong_draft_is_refused_before_it_is_run(model: str, drafter: type[Drafter], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model, **ENGINE, speculative_algorithm=drafter)


def test_options_know_its_tree_and_what_it_reads(caplog: pytest.LogCaptureFixture) -> None:
    asked = Options(speculative_algorithm=WithModel, speculative_draft_model_path="x", speculative_token_map="y")
    with caplog.at_level(logging.WARNING):
        options = asked.resolve()
    assert options.speculative_shape == TreeShape(4, 2, 9) and not options.speculative_fixed_shape
    assert options.drafter.endswith(":WithModel") and options.resolve() == options
    assert "WithModel, --speculative-token-map has no effect" in caplog.text
    steps = Options(speculative_algorithm=WithModel, speculative_num_steps=2).resolve()
    assert steps.speculative_shape.tree == (2, 2, 7)
    Odd.num_steps = 1
    try:
        with pytest.raises(ConfigError, match="speculative_draft_model_path needs a speculative_algorithm"):
            Options(speculative_algorithm=Odd, speculative_draft_model_path="x").resolve()
    finally:
        Odd.num_steps = 0


@pytest.mark.parametrize("menu_of", [tree_menu, chain_menu, match_menu, half_menu])
@pytest.mark.parametrize(
    "tree",
    [TREE[:3], (3, 1, 4), (4, 2, 8), (1, 1, 2), (2, 2, 5), (6, 8, 64)],
    ids=lambda tree: "-".join(map(str, tree)),
)
def test_menus(menu_of: object, tree: tuple[int, int, int]) -> None:
    shape = TreeShape(*tree)
    menu = menu_of(shape)  # type: ignore[operator]
    assert menu[0] == shape and menu[-1] == PLAIN and len(set(menu)) == len(menu)
    for one in menu[:-1]:
        assert 1 < one.queries <= one.nodes <= max(shape.nodes, shape.topk + 1) and 0 < one.depth <= shape.depth
        assert one.nodes > one.depth and one.topk <= shape.topk
