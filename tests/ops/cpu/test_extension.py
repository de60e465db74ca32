"""The C extension: it is built, which instruction set it is taken for, and all of them compute the same bits."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.ops.cpu import extension
from draftwing.ops.cpu.extension import checked, chosen_isa, load_extension, usable_sets
from draftwing.ops.cpu.isa import PLAIN, known_sets, runnable_sets
from draftwing.ops.gemm.cpu import PackedGemm

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


# -- built ------------------------------------------------------------------------------------------------------------

wanted = pytest.mark.skipif(os.environ.get("DRAFTWING_NATIVE") == "0", reason="they are not wanted")
compiled = pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="needs a C compiler")


@wanted
@compiled
def test_the_extension_was_built() -> None:
    """For this CPU, too: of what it runs, only what a compiler does not know may be missing."""
    assert PLAIN in usable_sets()
    assert chosen_isa() is not None and load_extension() is not None


def cpu_flags() -> set[str]:
    """Of the first core; empty where there is no such list."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


@wanted
@compiled
def test_gemms_of_few_rows_are_ours() -> None:
    """On the CPUs that the kernel was written for; where oneDNN packs or sums in another way, it is left out."""
    import torch

    from draftwing.layers.linear import Linear

    flags = cpu_flags()
    if not {"avx512_bf16", "avx512_vnni"} <= flags or any(flag.startswith("amx") for flag in flags):
        pytest.skip("another CPU than one with AVX-512 BF16 and without AMX")
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((64, 64), (576, 960), (1536, 576)):
        linear = Linear(inputs, outputs, False, torch.bfloat16, torch.device("cpu"))
        linear.weight.data.copy_(torch.randn(outputs, inputs, generator=generator))
        linear.pack(make_ops(torch.device("cpu")))
        assert isinstance(linear.op.first_gemm, PackedGemm), (inputs, outputs)


def test_an_extension_of_other_sources_is_refused() -> None:
    with pytest.raises(ConfigError):
        checked(ModuleType("old"))


@wanted
@compiled
def test_a_function_says_how_many_numbers_it_takes() -> None:
    raw = load_extension()
    assert raw is not None
    for function, given, expected in ((raw.gate, (1, 2), 8), (raw.soft_cap, (0,) * 6, 7), (raw.draw, (0,) * 22, 21)):
        with pytest.raises(TypeError, match=f"expected {expected} numbers, found {len(given)}"):
            function(*given)
    with pytest.raises(TypeError):
        raw.soft_cap(*(0.5,) * 7)


# -- bits -------------------------------------------------------------------------------------------------------------

PROBE = Path(__file__).parents[1] / "isa_probe.py"
SETS = [isa.name for isa in usable_sets()] if load_extension() is not None else []


@functools.cache
def hashes(isa: str) -> dict[str, str]:
    """{case: sha256} of a process that runs this set."""
    environ = {**os.environ, "DRAFTWING_CPU_ISA": isa}
    out = subprocess.run([sys.executable, PROBE], env=environ, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not SETS, reason="the C extension was not built, or is not wanted")
@pytest.mark.further(isa=SETS[2:-1])  # between the first with vectors and the best
@pytest.mark.parametrize("isa", SETS[1:])
def test_every_set_computes_the_same_bits(isa: str) -> None:
    expected, found = hashes("plain"), hashes(isa)
    assert len(expected) > 16
    assert [name for name in expected if expected[name] != found[name]] == []


PATH = Path(__file__).resolve().parents[3] / "tools" / "neon.py"


@pytest.fixture(scope="module")
def neon() -> ModuleType:
    spec = importlib.util.spec_from_file_location("neon", PATH)
    assert spec is not None and spec.loader is not None
    neon = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(neon)
    if not neon.ready():
        pytest.skip("needs what `make neon` downloads, and its tools")
    return neon


@pytest.mark.slow
def test_aarch64_computes_the_same_bits(neon: ModuleType) -> None:
    assert neon.compare(neon.KERNELS) == []


@pytest.mark.slow
@pytest.mark.exhaustive  # two minutes for each instruction set
def test_aarch64_writes_the_same_text(neon: ModuleType, smollm2_path: Path) -> None:
    assert neon.compare(neon.TEXT) == []
