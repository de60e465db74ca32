"""Text is the same with drafts as without where queries attend to what an indexer picks, far fewer tokens than there
are: over trees and chains, chunks, cached prefixes and preemption."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from engine_rig import BLOCKS, RANKS
from exactness import OWN_CUDA, Exactness, case_of
from layer_kinds import INDEXED, config_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def case(harness, one_thread):
    return case_of(harness, partial(harness.model_of, config_of(INDEXED, harness.CONTEXT)))


@pytest.mark.parametrize("harness", ["cpu", "torch", BLOCKS, RANKS, OWN_CUDA], indirect=True, scope="session")
class TestIndexed(Exactness):
    slots = 90


@pytest.mark.parametrize("harness", ["cpu"], indirect=True, scope="session")
def test_picks_change_the_text(harness, case):
    """Else nothing above would say anything of them."""
    mixers = [replace(mixer, index=replace(mixer.index, topk=harness.CONTEXT)) for mixer in INDEXED]
    dense = case_of(harness, partial(harness.model_of, config_of(mixers, harness.CONTEXT)))
    changed = [dense[3].tokens[key] != answer for key, answer in case[3].tokens.items()]
    assert sum(changed) > len(changed) // 2
