"""Requests that ask to see their drafts: what they get agrees with what was committed, and changes nothing."""

import pytest

from draftwing.config.trees import OTHER, TreeShape

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(4, 3, 11)


@pytest.fixture(scope="module")
def case(harness):
    model = harness.tiny_model()
    prompts = harness.prompts_for(5)
    params = [*[harness.greedy(18 + 3 * i) for i in range(3)], harness.seeded(20), harness.seeded(25)]
    expected = harness.plain_answers(model, prompts, params)
    return model, prompts, params, expected, harness.make_book(prompts, expected)


def run(harness, case, traced, **how):
    """Tokens of all requests, and the traced steps by uid; every second request is traced, if any."""
    model, prompts, params, _, book = case
    rig = harness.Rig(model, policy=harness.Cycle(TREE, CHAIN), book=book, rows=4, **how)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        rig.submit(str(i), prompt, param, traced=traced and i % 2 == 0)
    steps, take = {}, rig.sched.take_outputs

    def watched():
        outputs = take()
        for output in outputs:
            for step in output.trace:
                assert step.tokens == output.token_ids, "a step's tokens come with the step"
                steps.setdefault(output.uid, []).append(step)
        return outputs

    rig.sched.take_outputs = watched
    return rig.run().tokens, steps


@pytest.mark.slow
@pytest.mark.further(graph_size=4, drafter=["ngram", "suffix", None])
@pytest.mark.parametrize("graph_size", [0, 4])
@pytest.mark.parametrize(("drafter", "lag"), [("oracle", 0), ("oracle", 1), ("ngram", 1), ("suffix", 0), (None, 0)])
def test_a_trace_is_what_was_committed(harness, case, drafter, lag, graph_size):
    how = dict(drafter=drafter, lag=lag, graph_size=graph_size) | (dict(miss=2) if drafter == "oracle" else {})
    tokens, steps = run(harness, case, True, **how)
    assert tokens == case[3].tokens and set(steps) == {"0", "2", "4"}
    accepted = branches = 0
    for uid, reported in steps.items():
        assert [token for step in reported for token in step.tokens] == tokens[uid]
        assert [step.number for step in reported] == list(range(len(reported))) and not reported[0].nodes
        assert all(1 <= step.requests <= 4 and step.seconds > 0 for step in reported)
        for step in reported:
            taken = [place for place, node in enumerate(step.nodes) if node.accepted]
            path = [step.nodes[place] for place in taken]
            assert [node.token for node in path] == step.tokens[: len(path)], "accepted drafts are committed tokens"
            assert [node.parent for node in path] == [None, *taken][: len(path)], "they are a path from the root"
            assert len(step.tokens) <= len(path) + 1
            accepted += len(path)
            for place, node in enumerate(step.nodes):
                assert node.parent is None or node.parent < place
                assert 0 <= node.survival <= 1 and 0 <= node.source < 4 and node.verified >= node.accepted
            siblings = [node.parent for node in step.nodes]
            branches += len(siblings) - len(set(siblings))
    if drafter is None:
        assert not any(step.nodes for reported in steps.values() for step in reported)
    if drafter == "oracle":
        assert accepted > 20 and branches > 10
        assert {node.source for reported in steps.values() for step in reported for node in step.nodes} == {OTHER}


def test_nothing_is_collected_where_nobody_asked(harness, case):
    tokens, steps = run(harness, case, False, drafter="oracle", miss=2)
    assert tokens == case[3].tokens and not steps


def test_a_plan_downloads_for_those_who_asked_alone(harness, case):
    model, prompts, params, _, book = case
    rig = harness.Rig(model, shapes=(TREE,), drafter="oracle", book=book)
    seen, commit = [], rig.sched.commit

    def watched(plan, result, guidance=None):
        seen.append((plan.traced.tolist(), None if result.drafts is None else result.drafts.tokens.shape))
        commit(plan, result, guidance)

    rig.sched.commit = watched
    for i in range(3):
        rig.submit(str(i), prompts[i], params[i], traced=i == 1)
    rig.run()
    assert {shape for traced, shape in seen if not traced} == {None}
    assert {shape for traced, shape in seen if traced} == {None, (1, TREE.nodes)}  # None: of prompts
