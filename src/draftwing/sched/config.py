"""What a scheduler is made for: sizes, and what device and drafter need of plans."""

from __future__ import annotations

from dataclasses import dataclass

from draftwing.core import MAX_BACKLOG, NO_DEFERRAL, DraftDeferral, TreeShape
from draftwing.sched.policy.choice import Mixes
from draftwing.sched.state_slots import StateSizes


@dataclass(frozen=True)
class SchedulerConfig:
    slots: int  # KV slots in the pool
    max_rows: int  # requests that may run at once
    max_span: int  # most page-table entries past kv_len that a step may write
    chunk_tokens: int  # most prompt tokens in one prefill plan
    lookahead: int = 0
    tail: int = 0  # page-table entries past a prompt's end that its last chunk may write
    radix: bool = True
    initial_confidence: int = 0  # the drafter's confidence, as long as no result has told it
    ahead: int = 0  # page-table entries to hand out beyond what a tree step needs, so that most steps upload none
    vocab: int = 0  # width of the target's logits
    skips_extend: frozenset[TreeShape] = frozenset()  # shapes whose steps the drafter does not see until it catches up
    # Most positions of a row in one pass then, and that it may lack where `deferral` says nothing else.
    max_backlog: int = MAX_BACKLOG
    deferral: DraftDeferral = NO_DEFERRAL  # of prompts
    credited: tuple[tuple[str, ...], ...] = ()  # whom a draft counts for, by its source
    states: StateSizes | None = None  # of a model with recurrent layers
    draws_alike: bool = False  # whether a step of which nodes are picked can only draw greedily
    edits_by_row: bool = False  # whether a step with penalties or biases costs what others do
    # Queries of so many trees of a shape in one forward with parts of prompts, 0: they take turns; None: all do.
    mixes: Mixes | None = None
    prefill_sizes: tuple[int, ...] = ()  # tokens that a prefill is padded to, ascending; of more it is not
    mixed_sizes: tuple[int, ...] = ()  # queries that both together are padded to
    prefill_seconds: tuple[tuple[int, float], ...] = ()  # of prefills of so many tokens, none before them, measured
    at_once: int = 1  # tokens of prompts: fewer attend to their keys in the time of so many
