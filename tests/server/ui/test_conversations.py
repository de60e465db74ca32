"""The page's conversations without a browser: the tree of messages, merging, search, and files, in Node.js."""

from __future__ import annotations

import random
from typing import Any

import pytest
from browsing import Run

Fields = dict[str, Any]

PRELUDE = """
import { Conversation, toKeep, wordsOf } from "./branches.js";
import { fileName, fromJson, toJson, toMarkdown } from "./transfer.js";
const said = (one) => one.messages.map(({ content }) => content);
const answer = (content) => ({ answers: [{ content, reasoning: "", drafts: true }] });
"""


@pytest.fixture
def run(run: Run) -> Run:
    """Runs a script that knows the names above."""
    return lambda script, data=None: run(PRELUDE + script, data)


def test_versions(run: Run) -> None:
    found = run("""
      const one = new Conversation();
      const first = one.add(null, "user", "first question");
      const a = one.add(first, "assistant", "a", answer("a"));
      one.add(a, "user", "more");
      const b = one.add(first, "assistant", "b", answer("b"));
      const shown = [said(one)];
      one.choose(a);
      shown.push(said(one));
      const edited = one.add(null, "user", "edited question");
      shown.push(said(one));
      one.choose(first);
      shown.push(said(one));
      const versions = [one.versions(b).length, one.versions(edited).length];
      const before = one.before(one.messages[2]).map(({ content }) => content);
      give({ shown, versions, before, title: one.title, nodes: one.nodes.length });
    """)
    assert found["shown"] == [
        ["first question", "b"],
        ["first question", "a", "more"],
        ["edited question"],
        ["first question", "a", "more"],
    ]
    assert found["versions"] == [2, 2] and found["before"] == ["first question", "a"]
    assert found["title"] == "first question" and found["nodes"] == 5, "no message is ever lost"


def conversation(rng: random.Random, nodes: list[Fields]) -> Fields:
    return {
        "id": "c", "title": f"title {rng.random()}", "system": "", "changed": rng.randrange(100),
        "chosen": {}, "nodes": nodes,
    }  # fmt: skip


def tree(rng: random.Random, count: int, start: list[Fields], name: str) -> list[Fields]:
    """More messages below any of the earlier ones; some of the earlier ones were changed."""
    nodes = [dict(node, changed=node["changed"] + 1, content=name) if rng.random() < 0.2 else node for node in start]
    for i in range(count):
        parent = rng.choice([*nodes, None])
        node = {"id": f"{name}{i}", "parent": parent["id"] if parent else "", "role": "user", "content": f"{name}{i}"}
        nodes.append(node | {"made": 1000 + len(nodes), "changed": 1000 + len(nodes)})
    return nodes


@pytest.mark.parametrize("seed", range(3))
def test_merging_two_tabs(run: Run, seed: int) -> None:
    """Each order of merging gives the same nodes: those of both, the newer of two with the same id."""
    rng = random.Random(seed)
    shared = tree(rng, 6, [], "s")
    copies = [conversation(rng, tree(rng, 5, shared, name)) for name in "ab"]
    newer: Fields = {}
    for node in copies[0]["nodes"] + copies[1]["nodes"]:
        if node["id"] not in newer or node["changed"] > newer[node["id"]]["changed"]:
            newer[node["id"]] = node
    ours, theirs = run(
        """
      const merged = (a, b) => {
        const one = Conversation.from(a);
        one.merge(Conversation.from(b));
        return toKeep(one);
      };
      const [a, b] = data;
      const kept = JSON.stringify(merged(a, b));
      const twice = JSON.stringify(merged(merged(a, b), b));
      if (kept !== twice) throw new Error("merging again changed it");
      give([merged(a, b), merged(b, a)]);
    """,
        copies,
    )
    tied = {node["id"] for node in newer.values() if sum(node["id"] == one["id"] for one in shared)}
    assert [node["id"] for node in ours["nodes"]] == [node["id"] for node in theirs["nodes"]]
    assert {node["id"] for node in ours["nodes"]} == set(newer)
    for node in ours["nodes"]:
        assert node["changed"] == newer[node["id"]]["changed"]
        assert node["id"] in tied or node == newer[node["id"]]
    assert ours["title"] == theirs["title"] == max(copies, key=lambda one: one["changed"])["title"]


OLD = {
    "id": "1-2", "title": "Old", "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "answers": [{"content": "a", "reasoning": "", "drafts": True}]},
    ],
}  # fmt: skip


def test_what_was_kept_before_there_were_versions(run: Run) -> None:
    found = run(
        """
      const [one, again] = [5, 7].map((now) => Conversation.from(data, now));
      const title = one.title;
      one.merge(again);
      give([title, one.system, said(one), one.nodes.length, one.messages[1].answers.length]);
    """,
        OLD,
    )
    assert found == ["Old", "Be brief.", ["q", "a"], 2, 1], "read twice, it is the same conversation"


def test_what_is_no_conversation(run: Run) -> None:
    node = {"id": "n", "parent": "", "role": "user", "content": "q", "made": 1, "changed": 1}
    whole = conversation(random.Random(0), [node])
    wrong = [
        None, 7, "a", [], {}, {"id": 1, "system": "", "messages": []}, whole | {"nodes": []}, whole | {"system": 1},
        *(whole | {"nodes": [node | change]} for change in (
            {"content": 1}, {"role": "system"}, {"parent": None}, {"made": "x"}, {"role": "assistant"},
            {"role": "assistant", "answers": []}, {"role": "assistant", "answers": [{}]}, {"id": ""},
        )),
    ]  # fmt: skip
    assert run("give(data.map((one) => Conversation.from(one) === null))", [*wrong, whole]) == [
        *[True] * len(wrong),
        False,
    ]


def test_what_runs_is_kept_as_stopped(run: Run) -> None:
    found = run("""
      const one = new Conversation();
      const asked = one.add(null, "user", "q");
      const running = { content: "so far", reasoning: "", running: true, trace: { steps: [1] } };
      one.add(asked, "assistant", "so far", { answers: [running] });
      give([toKeep(one).nodes[1].answers, Boolean(running.trace && running.running)]);
    """)
    assert found == [[{"content": "so far", "reasoning": "", "finish": "stopped"}], True]


def test_search(run: Run) -> None:
    found = run("""
      const one = new Conversation({ title: "Cooking" });
      const asked = one.add(null, "user", "How long do I boil an egg?");
      one.add(asked, "assistant", "x".repeat(200), answer("x".repeat(200) + " Seven minutes, à la coque."));
      one.add(null, "user", "another version");
      const look = (text) => one.find(wordsOf(text));
      const sought = ["COOKING", "egg boil", "A LA COQUE", "version", "egg fish", "cooking minutes"];
      give(sought.map(look));
    """)
    assert found[0] == "" and found[1] == "…w long do I boil an egg?"
    assert "Seven minutes, à la coque." in found[2] and found[2].startswith("…"), "in other versions, without accents"
    assert found[3] == "another version" and found[4] is None and "minutes" in found[5]


def test_export_and_import(run: Run) -> None:
    found = run("""
      const one = new Conversation({ system: "Be brief." });
      const asked = one.add(null, "user", "Say *hi*");
      const answers = [{ content: "lo", drafts: true }, { content: "hi", drafts: false }];
      one.add(asked, "assistant", "lo", { answers });
      const other = one.add(null, "user", "Say hello");
      one.add(other, "assistant", "hello", answer("hello"));
      const [back] = fromJson(toJson([one]));
      const same = JSON.stringify(toKeep(back)) === JSON.stringify(toKeep(one));
      one.choose(asked);
      const list = [["system", "s"], ["user", "q"], ["assistant", "a"]].map(([role, content]) => ({ role, content }));
      const [chat] = fromJson(JSON.stringify(list));
      const wrong = ["{", "{}", "[]", "null", '{"conversations": [7]}', '{"version": 2}'].map((text) => {
        try { return fromJson(text); } catch (error) { return error.message; }
      });
      give([same, toMarkdown(one), [chat.system, said(chat)], wrong, fileName("a/b: ñ?", "md")]);
    """)
    same, markdown, chat, wrong, name = found
    assert same and chat == ["s", ["q", "a"]] and name == "a-b-ñ.md"
    assert markdown.split("\n\n") == [
        "# Say *hi*", "## System", "Be brief.", "## User", "Say *hi*",
        "## Assistant (with drafts)", "lo", "## Assistant (without drafts)", "hi\n",
    ]  # fmt: skip
    assert all(isinstance(one, str) and one.endswith(".") for one in wrong)
