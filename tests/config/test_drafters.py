"""The registry of drafters: its names, what each row says, and that builders are where rows say."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

from draftwing import ConfigError
from draftwing.config.drafters import (
    DEFAULT,
    DRAFTERS,
    NO_DRAFTER,
    SECOND,
    TRAINED,
    find_drafter,
    head_drafter,
    training,
)
from draftwing.config.options import Options
from draftwing.train.fit_config import recipe


def test_names_and_aliases() -> None:
    assert find_drafter("none") is find_drafter("None") is NO_DRAFTER and NO_DRAFTER.build is None
    assert find_drafter("eagle3") is DEFAULT
    assert find_drafter("MTP") is find_drafter("nextn") is find_drafter("NEXTN")
    names = [name.lower() for spec in DRAFTERS for name in (spec.name, *spec.aliases)]
    assert len(names) == len(set(names))


def test_rows_name_what_there_is() -> None:
    fields = {spec.name for spec in dataclasses.fields(Options)}
    for spec in DRAFTERS:
        assert set(spec.options) <= fields
        assert spec.draft_model or not spec.heads
        if isinstance(spec.build, str):
            module, _, function = spec.build.partition(":")
            assert list(inspect.signature(getattr(importlib.import_module(module), function)).parameters) == ["context"]
        else:
            assert spec is NO_DRAFTER


def test_each_kind_of_head_has_a_drafter_and_a_training() -> None:
    kinds = {kind for spec in DRAFTERS for kind in spec.heads}
    names = {"eagle": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK", "dflash2": "DFLASH2",
             "mtp": "NEXTN"}  # fmt: skip
    assert {kind: head_drafter(kind).name for kind in kinds} == names
    assert {training(name).name: spec.name for name, spec in TRAINED.items()} == {
        **{name: name for name in ("EAGLE", "EAGLE3", "DFLASH", "DSPARK", "DFLASH2")}, "MTP": "NEXTN"
    }  # fmt: skip
    assert [name for name in TRAINED if training(name).aux_hidden_states] == ["EAGLE3", "DFLASH", "DSPARK", "DFLASH2"]
    assert (recipe("DFLASH").loss.kind, recipe("DSPARK").loss.kind) == ("kl", "tv")
    assert recipe("EAGLE").loss.steps == 1 and recipe("MTP").loss == recipe("EAGLE3").loss
    with pytest.raises(
        ConfigError, match="algorithm must be one of EAGLE, EAGLE3, DFLASH, DSPARK, DFLASH2, MTP; found 'NGRAM'"
    ):
        recipe("NGRAM")


@pytest.mark.parametrize("asked", ["EAGLE3+NGRAM", "ngram + eagle3"])
def test_a_pair_is_the_drafter_with_a_model_and_a_lookup(asked: str) -> None:
    pair, eagle3, ngram = find_drafter(asked), find_drafter("EAGLE3"), find_drafter("NGRAM")
    assert pair.name == "EAGLE3+NGRAM" and pair.parts == (eagle3, ngram)
    assert pair.options == (*eagle3.options, *ngram.options)
    differing = {"name", "build", "options", "training", "parts"}
    for field in dataclasses.fields(pair):
        assert field.name in differing or getattr(pair, field.name) == getattr(eagle3, field.name)
    assert find_drafter("SUFFIX+MTP").name == "NEXTN+SUFFIX" and not pair.own


def test_two_heads_and_a_lookup() -> None:
    found = find_drafter("SUFFIX+EAGLE3+MTP")
    assert found.name == "EAGLE3+NEXTN+SUFFIX" and found.lookup is find_drafter("SUFFIX")
    assert found.parts == tuple(map(find_drafter, ("EAGLE3", "NEXTN", "SUFFIX"))) and found.tree == found.parts[0].tree
    assert {SECOND, *(name for part in found.parts for name in part.options)} == set(found.options)
    heads = "EAGLE3", "NEXTN"
    assert found.credited[:4] == (("prediction",), heads[:1], ("SUFFIX",), ("EAGLE3", "SUFFIX"))
    assert found.credited[4:] == (heads[1:], heads, ("NEXTN", "SUFFIX"), (*heads, "SUFFIX"))
    two = find_drafter("DFLASH2+EAGLE3")
    assert two.lookup is None and two.heads == find_drafter("DFLASH2").heads and SECOND in two.options
    assert SECOND not in find_drafter("EAGLE3+NGRAM").options


@pytest.mark.parametrize(
    "asked",
    [
        "EAGLE3+EAGLE3",
        "NGRAM+SUFFIX",
        "none+NGRAM",
        "EAGLE3+",
        "EAGLE3+magic",
        "EAGLE3+NGRAM+NGRAM",
        "a:B+NGRAM",
        "STANDALONE+EAGLE3",
        "EAGLE3+EAGLE+NEXTN",
        "FROZEN_KV_MTP+EAGLE+NGRAM",
        "EAGLE3+NEXTN+NGRAM+SUFFIX",
    ],
)
def test_other_pairs_are_refused(asked: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a drafter with a model .*EAGLE3.* and a lookup .*NGRAM.* two different .*found"
    ):
        find_drafter(asked)
