"""Which instruction set the C extension is taken for."""

from __future__ import annotations

import pytest

from draftwing.errors import ConfigError
from draftwing.ops.cpu import extension
from draftwing.ops.cpu.isa import PLAIN, known_sets, runnable_sets

WORDS = {  # of /proc/cpuinfo, where they differ
    "lzcnt": "abm", "avx512_vbmi": "avx512vbmi",
}  # fmt: skip


@pytest.mark.parametrize(
    ("lacks", "best"),
    [
        (set(), "avx512_bf16"),
        ({"avx512_bf16"}, "avx512"),
        ({"avx512_vbmi"}, "avx512"),
        ({"avx512vl"}, "avx_vnni"),
        ({"avx512f", "avx_vnni"}, "avx2"),
        ({"fma"}, "plain"),
    ],
)
def test_a_cpu_runs_what_it_has_all_features_of(lacks: set[str], best: str) -> None:
    every = frozenset().union(*(isa.needs for isa in known_sets("x86_64")))
    assert runnable_sets(every - lacks, "x86_64")[-1].name == best


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables that are unset, and nothing chosen before or after."""
    if extension.load_extension() is None:
        pytest.skip("the C extension was not built, or is not wanted")
    monkeypatch.delenv("DRAFTWING_NATIVE", raising=False)
    monkeypatch.delenv("DRAFTWING_CPU_ISA", raising=False)
    for function in (extension.chosen_isa, extension.usable_sets):
        monkeypatch.setattr(extension, function.__name__, function.__wrapped__)
    return monkeypatch


def test_the_features_are_those_that_linux_names(fresh: pytest.MonkeyPatch) -> None:
    from draftwing.ops.cpu import _plain

    with open("/proc/cpuinfo") as file:
        found = next((line.split() for line in file if line.startswith(("flags", "Features"))), [])
    if not found:
        pytest.skip("Linux does not list them here")
    every, features = {feature for isa in known_sets() for feature in isa.needs}, set(_plain.cpu_features())
    named = {name for name in every if WORDS.get(name, name) in found}
    assert named == every & features


def test_the_best_set_is_chosen_or_the_one_that_is_named(fresh: pytest.MonkeyPatch) -> None:
    usable = extension.usable_sets()
    assert extension.chosen_isa() == usable[-1]
    for isa in usable:
        fresh.setenv("DRAFTWING_CPU_ISA", isa.name)
        assert extension.chosen_isa() == isa
    fresh.setenv("DRAFTWING_NATIVE", "0")
    assert extension.chosen_isa() is None


def test_a_set_that_is_not_there_is_refused_with_those_that_are(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("DRAFTWING_CPU_ISA", "avx3")
    with pytest.raises(ConfigError, match=r"found 'avx3'\. Known: plain.* Built: plain.* run by this CPU: plain"):
        extension.chosen_isa()


def test_without_a_feature_its_sets_are_left_out(fresh: pytest.MonkeyPatch) -> None:
    from draftwing.ops.cpu import _plain

    fresh.setattr(_plain, "cpu_features", list)
    assert extension.usable_sets() == (PLAIN,)
    others = [isa for isa in extension.built_sets() if isa != PLAIN]
    if others:
        fresh.setenv("DRAFTWING_CPU_ISA", others[0].name)
        with pytest.raises(ConfigError, match=r"run by this CPU: plain$"):
            extension.chosen_isa()


def test_the_log_says_that_it_is_missing_unless_that_is_wanted(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(extension, "built_sets", lambda: ())
    assert extension.load_extension.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    fresh.setenv("DRAFTWING_NATIVE", "0")
    assert extension.load_extension.__wrapped__() is None
    assert len(caplog.records) == 1
