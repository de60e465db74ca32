"""Which tests are slow, which are further cases, and in which order files run. Fixtures are in `shared_fixtures`."""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from changed import Changed

SLOW_FIXTURES = {"smollm2_path", "mended_interpreter"}
EACH = ("ops",)
MOST = 1  # cases of a slow test that `make test` runs, where other tests show the same of other cases
MANY = 1000  # tests behind which the slowest are printed
THINNED = ("tests/engine", "tests/spec", "tests/train")  # of ops, planted faults in Triton would get through
# Files that take some seconds of a processor, the longest first.
LONGEST = (
    "tests/engine/test_adapter_heads.py",
    "tests/ops/test_delta_net.py", "tests/ops/test_triton_compiled.py", "tests/server/router/test_processes.py",
    "tests/test_beside.py", "tests/cli/test_main.py", "tests/engine/startup/test_precompile.py",
    "tests/train/test_command.py", "tests/server/test_adapters.py", "tests/engine/test_images.py",
    "tests/engine/startup/test_executor.py", "tests/test_readme.py", "tests/engine/process/test_ranks.py",
    "tests/ops/attention/test_kinds.py", "tests/engine/test_sleep.py", "tests/train/test_traffic_stages.py",
    "tests/models/test_published.py", "tests/ops/experts/test_experts.py", "tests/engine/test_requests.py",
    "tests/engine/test_heads.py", "tests/ops/test_cuda_compile.py", "tests/sched/policy/test_shape_policy.py",
    "tests/models/families/test_qwen_hybrid.py", "tests/engine/test_head_fit.py", "tests/ops/test_suffix.py",
    "tests/engine/test_exact_adapters.py", "tests/models/test_decoder.py", "tests/engine/test_target.py",
    "tests/ops/cpu/test_extension.py", "tests/sched/test_scheduler_stateful.py", "tests/engine/test_answer_checks.py",
    "tests/engine/test_saved_prefixes.py", "tests/test_smollm2.py", "tests/server/router/test_library.py",
    "tests/engine/test_receipts.py", "tests/engine/test_three_sources.py", "tests/engine/test_exact.py",
    "tests/server/batches/test_restart.py", "tests/engine/test_adapters.py",
    "tests/models/heads/test_published_heads.py", "tests/engine/test_swap.py", "tests/engine/test_host_level.py",
    "tests/engine/test_hybrid_models.py", "tests/engine/test_blocks.py", "tests/engine/test_exact_states.py",
    "tests/ops/attention/test_triton.py", "tests/test_architecture.py", "tests/models/test_changed_configs.py",
    "tests/engine/test_saved_prefixes_killed.py", "tests/models/test_family_formats.py",
    "tests/engine/test_lazy_states.py", "tests/models/families/test_deepseek.py",
    "tests/engine/test_random_images.py", "tests/ops/gemm/test_cuda_wgmma.py", "tests/engine/test_assistant.py",
    "tests/server/batches/test_batches.py", "tests/spec/test_model_drafter_reference.py",
    "tests/ops/gemm/test_cuda_groups.py", "tests/server/test_process.py", "tests/parallel/test_shares.py",
    "tests/ops/attention/test_attend.py", "tests/images/test_attacks.py", "tests/ops/test_ngram.py",
    "tests/models/test_hostile_configs.py", "tests/engine/test_saved_slots.py", "tests/ops/experts/test_cpu.py",
    "tests/engine/test_triton_engine.py", "tests/ops/attention/test_groups.py",
    "tests/engine/test_fp8_activations.py", "tests/models/families/test_qwen4.py",
    "tests/models/adapters/test_peft.py",
)  # fmt: skip
ALL_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)  # of a file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", action="store_true", help="leave out tests of training that nothing has changed for")


def pytest_configure(config: pytest.Config) -> None:
    """What the fixtures import takes 3 s, which a process that only hands out files to others need not wait for."""
    hands_out = getattr(config.option, "numprocesses", None) and not config.option.collectonly
    if hasattr(config, "workerinput") or not hands_out:
        config.pluginmanager.import_plugin("shared_fixtures")
    config.pluginmanager.register(Changed(config), "changed")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Half of all cases are exhaustive: to make and mark them takes seconds where none of them runs. One case of each
    test stays in any case, since pytest would run it without parameters."""
    yield
    further = [mark.kwargs for mark in metafunc.definition.iter_markers("further")]
    kept = [
        call
        for call in metafunc._calls
        if not any(mark.name == "exhaustive" for mark in call.marks)
        and not any(matches(call.params, params) for params in further)
    ]
    here = [call for call in kept if not any(skips(mark) for mark in call.marks)]
    each = next((mark.args for mark in metafunc.definition.iter_markers("covering")), None)
    if each is None and here and len(here[0]._idlist) > 1 and not may_skip(metafunc):
        each = tuple(name for name in EACH if name in here[0].params)
    if each is not None:
        few = cover(here, each)
        for call in here:
            if not any(call is one for one in few):
                call.marks.append(pytest.mark.exhaustive.mark)
        kept = [call for call in kept if not any(mark.name == "exhaustive" for mark in call.marks)]
    if "not exhaustive" in metafunc.config.option.markexpr:
        metafunc._calls[:] = kept or metafunc._calls[:1]


def skips(mark: pytest.Mark) -> bool:
    """Whether a mark says that a case is skipped here."""
    return mark.name == "skipif" and bool(mark.args and mark.args[0])


def may_skip(metafunc: pytest.Metafunc) -> bool:
    """Whether a test or one of its fixtures, but for those of implementations, skips cases itself."""
    found = [definitions[-1].func for name, definitions in metafunc._arg2fixturedefs.items() if name not in EACH]
    functions = [inspect.unwrap(function) for function in (metafunc.function, *found)]
    return any("skip" in getattr(function, "__code__", may_skip.__code__).co_names for function in functions)


def cover(calls: list[Any], each: tuple[str, ...]) -> list[Any]:
    """Returns few cases, with all values of all parameters among them, each with all values of the parameters `each`
    that it has a case with."""

    def values(call: Any) -> set[object]:
        own = tuple(repr(call.params[name]) for name in each)
        return {(place, value, own) for place, value in enumerate(call._idlist)}

    left, few = set[object]().union(*map(values, calls)), list[Any]()
    while left:
        few.append(max(calls, key=lambda call: len(values(call) & left)))
        left -= values(few[-1])
    return few


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what the default model or Triton's interpreter makes so; others say it themselves. Marks as
    exhaustive the cases of which a test says that they are further ones. Files that take long begin first, so that none
    of several processes comes to them when the others have ended."""
    interpreted = "TRITON_INTERPRET" in os.environ
    for item in items:
        if any(has(item, **mark.kwargs) for mark in item.iter_markers("further")):
            item.add_marker(pytest.mark.exhaustive)
        slower = any(has(item, **mark.kwargs) for mark in item.iter_markers("slower"))
        fixtures = set(getattr(item, "fixturenames", ()))
        if slower or fixtures & SLOW_FIXTURES or (interpreted and "triton" in item.nodeid):
            item.add_marker(pytest.mark.slow)
    thin_out(items)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (order.get(item.nodeid.partition("::")[0], len(order)), item.path not in slow))


def thin_out(items: list[pytest.Item]) -> None:
    """Marks as exhaustive all but a few cases of a slow test of THINNED. Which ones stay depends on the test's name, so
    that tests with the same cases keep different ones."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name, marks = item.nodeid.partition("[")[0], {mark.name for mark in item.iter_markers()}
        runs = not any(skips(mark) for mark in item.iter_markers())
        if runs and name.startswith(THINNED) and "slow" in marks and not marks & {"exhaustive", "timing", "gpu"}:
            cases.setdefault(name, []).append(item)
    for name, found in cases.items():
        first = crc32(name.encode()) % len(found)
        stay = {(first + i * len(found) // MOST) % len(found) for i in range(MOST)}
        for i, item in enumerate(found):
            if i not in stay:
                item.add_marker(pytest.mark.exhaustive)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """To import all files takes 10 s. Few have tests that measure time, which `make` runs alone; and some have none of
    those that `make check` runs."""
    wanted = config.option.markexpr
    if not collection_path.name.startswith("test_") or not (wanted.startswith("timing ") or "not slow" in wanted):
        return None
    text = collection_path.read_text()
    none = "mark.timing" not in text if wanted.startswith("timing ") else ALL_SLOW.search(text) is not None
    return True if none else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What thousands of tests import makes each collection of an engine's garbage take a second, and to look for
    garbage meanwhile makes their import take a quarter longer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # with what is garbage: to look for it takes 2 s
        gc.enable()
        gc.set_threshold(5000)  # after 700 allocations it takes 2% of the time; engines of a server never look


@pytest.fixture(scope="module", autouse=True)
def frozen_module() -> Generator[None]:
    """What a file leaves stays for good: a collection in a later file, which training asks for after each measurement,
    looked through all of it for seconds."""
    yield
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints which tests took longest, each with all its cases."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("[")[0]] += report.duration  # type: ignore[assignment]
    if len(seconds) > MANY:
        terminalreporter.write_line(f"the slowest of {len(seconds)} tests, {sum(seconds.values()):.0f} s in all:")
        for name, taken in seconds.most_common(15):
            terminalreporter.write_line(f"{taken:6.1f} s {name}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """At its end pytest looks for garbage five times, in all that was imported; nothing is to be found then."""
    gc.freeze()


def has(item: pytest.Item, **params: Any) -> bool:
    """Whether a case has all of these parameters; a list gives several values."""
    own = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return matches(own, params)


def matches(own: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    """Whether `own` has all of these parameters, as `has`."""
    return all(
        name in own and (own[name] in value if isinstance(value, list) else own[name] == value)
        for name, value in params.items()
    )
