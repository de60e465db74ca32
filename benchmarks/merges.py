"""What drafters could accept together: their trees at each token of given texts, and what merges of them accept.

    python benchmarks/merges.py record KIND=FILE.jsonl ... --out trees.json [--tokens 500]
        [--drafters EAGLE3+NEXTN+SUFFIX] [--options '{"num_threads": 1}']
    python benchmarks/merges.py compare trees.json ... [--nodes 16,24,32]

Files are those of `sources.py` that give answers; of each kind about `--tokens` tokens are taken, a few hundred of a
conversation. Nothing is accepted while trees are recorded, which takes a tenth of a second a token. `compare` then
replays the texts and says tokens a step: of each drafter alone, of all as the engine merges them, in trees of so many
nodes; of an oracle that takes one tree, the best in that step; and of all their nodes, which no merge can exceed. In
brackets is the share of the best one alone. Calibration is learnt along all texts of a kind, from nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar

import torch
from load_runs import listed
from sources import asked, prompt, saying

import draftwing.spec.build
from draftwing import LLM
from draftwing.config.trees import MODEL, PLAIN, SECOND_MODEL, TREE, TreeShape
from draftwing.ops import make_ops
from draftwing.ops.assign.spec import DEPTHS, LEVELS, forget, new_calibration, roots_alone
from draftwing.ops.types import Draft
from draftwing.spec.drafter import DraftStep
from draftwing.spec.heads_drafter import HeadsDrafter
from draftwing.spec.pair_drafter import PairDrafter

GROWN, DEEPEST = TreeShape(5, 4, 16), 15  # a head's recorded tree; levels of a merged one
CONVERSATION, ANSWER, LONGEST = 250, 250, 2500  # tokens taken of a conversation and of an answer, and of its prompt
Node = tuple[int, int, int]  # token, parent, grade; a tree's first one is the root


# -- recording ---------------------------------------------------------------------------------------------------------


class Recorder(PairDrafter):
    """Drafts, keeps the trees of each part, and proposes nothing."""

    names: ClassVar[Sequence[str]] = ()  # of the parts
    kept: ClassVar[dict[int, dict[str, list[Node]]]] = {}  # by the index of the newest token

    def menu(self, shape: TreeShape) -> tuple[TreeShape, ...]:
        return TreeShape(1, 1, 2), PLAIN

    def span(self, shape: TreeShape) -> int:
        return max(super().span(self.grown), super().span(self.copied))

    def propose(self, step: DraftStep) -> Draft:
        heads = [self.model.first, self.model.other] if isinstance(self.model, HeadsDrafter) else [self.model]
        parts = [(part, self.grown) for part in heads] + [(self.lookup, self.copied)]
        drafts = [part.propose(step._replace(shape=shape)) for part, shape in parts]
        trees = dict(zip(self.names, map(live, drafts), strict=True))
        self.kept[int(step.table.kv_len[step.rows[0]])] = trees
        return roots_alone(step.table, step.rows, step.shape.nodes)


def live(draft: Draft) -> list[Node]:
    """Returns the nodes of one row that are alive."""
    assert draft.grade is not None
    alive, *columns = (x[0].tolist() for x in (draft.alive, draft.tokens, draft.parent, draft.grade))
    place = {n: sum(alive[:n]) for n in range(len(alive))}
    nodes = [(token, place[above], grade) for token, above, grade in zip(*columns, strict=True)]
    return [node for node, there in zip(nodes, alive, strict=True) if there]


def record(args: argparse.Namespace) -> None:
    draftwing.spec.build.PairDrafter = Recorder  # type: ignore[misc]
    Recorder.names = args.drafters.split("+")
    found: dict[str, list[Any]] = {}
    options = dict(zip(TREE, GROWN, strict=False)) | {"logit_processor": "sources:say", "max_running_requests": 1}
    with LLM(
        args.model, speculative_algorithm=args.drafters, speculative_fixed_shape=True, **options, **args.options
    ) as llm:
        for word in args.files:
            kind, _, file = word.partition("=")
            rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
            random.Random(1).shuffle(rows)
            found[kind], left = [], args.tokens
            while rows and left > 0:
                texts = conversation(llm, rows.pop(), min(left, CONVERSATION))
                left -= sum(len(text["answer"]) for text in texts)
                found[kind] += texts
                args.out.write_text(json.dumps(found), encoding="utf-8")


def conversation(llm: LLM, row: dict[str, Any], most: int) -> list[dict[str, Any]]:
    """Returns its texts, each with a prompt, an answer, and the trees by the index of the newest token."""
    found: list[dict[str, Any]] = []
    assert llm.engine.flush_cache()
    for messages, given in asked(row):
        ids = prompt(llm.engine.tokenizer, messages, LONGEST)
        answer = llm.engine.tokenizer.encode(given or "", False)[: min(ANSWER, most)]
        if len(ids) > LONGEST or len(answer) < 2:
            break
        Recorder.kept.clear()
        (said,) = llm.generate([ids], saying({"temperature": 0, "dry_multiplier": 0}, answer, len(ids)))
        assert said.token_ids == answer, "another answer than the given one"
        found.append({"prompt": ids, "answer": answer, "trees": dict(Recorder.kept)})
        most -= len(answer)
    return found


# -- replays -----------------------------------------------------------------------------------------------------------

Trees = dict[str, list[Node]]
Choice = Callable[[Trees, Any, Sequence[int]], list[Node]]  # what is verified, by calibration and what follows


def path(nodes: Sequence[Node], following: Sequence[int]) -> list[int]:
    """Returns the nodes that the text goes through, the root first."""
    places, found = {(above, token): n for n, (token, above, _) in enumerate(nodes) if n}, [0]
    for token in following:
        if (found[-1], token) not in places:
            break
        found.append(places[found[-1], token])
    return found


def drafted(nodes: Sequence[Node], second: bool) -> Draft:
    """The tree of one row. second: whether a head's is the second one's."""
    token, above, grade = (torch.tensor(column)[None] for column in zip(*nodes, strict=True))
    if second:
        grade = torch.where(grade // LEVELS == MODEL, grade + (SECOND_MODEL - MODEL) * LEVELS, grade)
    return Draft(token, above, torch.ones_like(token, dtype=torch.bool), grade)


def together(nodes: int, trees: Trees, calibration: Any, following: Sequence[int]) -> list[Node]:
    """The engine's merge: two heads first, then the lookup."""
    merge, shape = make_ops(torch.device("cpu")).merge, TreeShape(DEEPEST, 4, nodes)
    parts = [drafted(tree, second=number == 1) for number, tree in enumerate(trees.values())]
    return live(reduce(lambda one, other: merge(one, other, shape, calibration), parts))


def one_of(trees: Trees, calibration: Any, following: Sequence[int]) -> list[Node]:
    return max(trees.values(), key=lambda nodes: len(path(nodes, following)))


def all_of(trees: Trees, calibration: Any, following: Sequence[int]) -> list[Node]:
    return together(1 + sum(map(len, trees.values())), trees, calibration, following)


def alone(name: str, trees: Trees, calibration: Any, following: Sequence[int]) -> list[Node]:
    return trees[name]


def length(texts: Sequence[dict[str, Any]], choose: Choice) -> float:
    """Tokens a step."""
    calibration, steps, tokens = new_calibration(torch.device("cpu")), 0, 0
    for text in texts:
        first, at, answer = len(text["prompt"]), 0, text["answer"]
        while at < len(answer) - 1:
            nodes = choose(text["trees"][str(first + at)], calibration, answer[at + 1 :])
            right = path(nodes, answer[at + 1 :])
            learn(calibration, nodes, set(right))
            count = min(len(right), len(answer) - 1 - at)
            at, steps, tokens = at + count, steps + 1, tokens + count
    return tokens / steps


def learn(calibration: Any, nodes: Sequence[Node], right: set[int]) -> None:
    """Counts nodes as `ops.assign.spec.learn`."""
    depth = [0]
    for n, (_, above, grade) in list(enumerate(nodes))[1:]:
        depth.append(depth[above] + 1)
        if above in right:
            calibration.seen[grade, min(depth[n], DEPTHS - 1)] += 1
            calibration.accepted[grade, min(depth[n], DEPTHS - 1)] += n in right
    forget(calibration)


def compare(args: argparse.Namespace) -> None:
    for file in args.files:
        kinds = json.loads(Path(file).read_text(encoding="utf-8"))
        kinds["all"] = [text for texts in kinds.values() for text in texts]
        for kind, texts in kinds.items():
            names = next(iter(texts[0]["trees"].values()))
            found = {name: length(texts, partial(alone, name)) for name in names}
            best = max(found.values())
            found |= {f"together, {nodes}": length(texts, partial(together, nodes)) for nodes in args.nodes}
            found |= {"one of them": length(texts, one_of), "all": length(texts, all_of)}
            size = sum(len(text["answer"]) for text in texts)
            figures = (f"{name} {value:.3f} ({value / best:.3f})" for name, value in found.items())
            print(f"{kind}, {size} tokens:", "  ".join(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafters", default="EAGLE3+NEXTN+SUFFIX")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--nodes", type=listed(int), default=(GROWN.nodes,))
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    args = parser.parse_args()
    record(args) if args.what == "record" else compare(args)


if __name__ == "__main__":
    main()
