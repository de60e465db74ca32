"""The KV pool's size: what steps take is measured by running them, and a refusal names the number to change."""

import logging
from types import SimpleNamespace

import pytest
import torch
from layer_kinds import HYBRIDS, KINDS, config_of

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.image_features import BUDGET
from draftwing.engine.startup import memory as sizing
from draftwing.engine.startup.executor import make_executor
from draftwing.engine.startup.models import Precision
from draftwing.engine.startup.warm_up import warm_up
from draftwing.errors import CheckpointError, ConfigError
from draftwing.kv.pool import KVSpec, StateSpec
from draftwing.layers.mlp import GatedMLP
from draftwing.models.heads.base import DraftLM
from draftwing.ops import make_ops
from draftwing.sched.policy.cost import StepCost
from draftwing.spec.lookup_drafter import NGramDrafter
from draftwing.spec.model_drafter import ModelDrafter

GB = 10**9
TREE = TreeShape(5, 3, 8)
FLOAT32 = Precision(torch.float32, torch.float32)


@pytest.fixture
def rig(on_cpu):
    drafter = NGramDrafter(capacity=4096, rows=7, ops=make_ops(torch.device("cpu")))
    return sizing.Rig(on_cpu.tiny_model(), drafter, (TREE, PLAIN), torch.float32, pick_device("cpu"))


@pytest.fixture
def no_peak(monkeypatch):
    """Trial steps run, and take no memory."""
    monkeypatch.setattr(sizing, "peak", lambda executor, plan: executor.commit(executor.launch(plan)).wait() and 0)


def options(**kw):
    return Options(model="x", max_running_requests=6, chunked_prefill_size=20, **kw).resolve()


@pytest.mark.parametrize(("layers", "from_tokens", "most"), [(1, False, 2048), (4, False, 1024), (30, True, 100_000)])
def test_a_pass_over_a_prompt_is_no_longer_than_a_prefill(rig, layers, from_tokens, most):
    """A trial step measures what that takes; a draft model's launches take longer than its positions."""
    rig.drafter.kv_layers, rig.drafter.from_tokens = [KVSpec(2, 16)] * layers, from_tokens
    rig.device.has_own_memory = True
    for chunk in (20, 8192, 100_000):
        chosen = sizing.deferral_of(Options(model="x", chunked_prefill_size=chunk), rig)
        assert chosen.most == min(chunk, most) and chosen.from_tokens == from_tokens


@pytest.mark.parametrize(("aux", "lookahead", "kept"), [((1, 2), 1, 2), ((2,), 0, 1), ((2,), 2, 0), ((), 0, 0)])
def test_hidden_states_beside_the_slots_take_their_part_of_the_pool(rig, monkeypatch, aux, lookahead, kept):
    """On a CPU, for a drafter that can be shown any text with them."""
    rig.drafter.kv_layers, rig.drafter.aux_layers, rig.drafter.lookahead = rig.layers[1:], aux, lookahead
    monkeypatch.setattr(type(rig.device), "free_memory", lambda self: 4 * GB)
    slot = 3 * 2 * 2 * 16 * 4 + kept * rig.model.config.hidden_size * 4
    assert sizing.size_pool(options(), rig, 10**6, 0).tokens == GB // slot
    assert sizing.deferral_of(options(), rig).by_slot == (kept > 0)


@pytest.mark.usefixtures("no_peak")
@pytest.mark.parametrize(("context", "fits"), [(40, True), (40, False), (None, True)])
def test_room_is_left_for_the_largest_image(rig, monkeypatch, caplog, context, fits):
    """Of a context's tokens, by default the model's, for one that is begun while steps run, and for features that are
    kept; an image without room is no reason not to start."""
    seen, side = [], context or rig.model.config.max_positions

    def parts(pixels, tokens):
        seen.append((tuple(pixels.shape), tokens))
        if not fits:
            raise torch.OutOfMemoryError
        yield 1
        raise AssertionError("a layer is enough")

    of_side = {"begun_bytes": lambda side, itemsize: side**2 * itemsize, "rows_bytes": lambda side, itemsize: side}
    config = SimpleNamespace(largest_side=lambda tokens: tokens, **of_side)
    tower = SimpleNamespace(config=config, parts=parts)
    monkeypatch.setattr(rig.device, "peak", lambda run: run() and 5 * GB, raising=False)
    before, _ = sizing.trial(options(context_length=context), rig, graph_size=0)
    monkeypatch.setattr(sizing, "Executor", lambda *parts: SimpleNamespace(target=SimpleNamespace()))
    monkeypatch.setattr(sizing, "peak", lambda executor, plan: before)
    rig.model.tower = tower
    step, _ = sizing.trial(options(context_length=context), rig, graph_size=0)
    image = 5 * GB + side * side * 3 + side if fits else before + rig.device.ops.attention_bytes + side**2 * 4
    assert step == image + BUDGET and seen == [((side, side, 3), side)]
    assert ("40 x 40 pixels do not fit" in caplog.text) == (not fits)


@pytest.mark.usefixtures("no_peak")
def test_the_drafters_layers_follow_what_the_targets_keep(on_cpu, monkeypatch):
    """Of a target with fewer layers in the pool than it has: some read another's keys."""
    model, cpu = on_cpu.model_of(config_of(KINDS["shared"], on_cpu.CONTEXT)), pick_device("cpu")
    draft = DraftLM(on_cpu.model_of(config_of(KINDS["recurrent"], on_cpu.CONTEXT)), on_cpu.VOCAB)
    drafter = ModelDrafter(draft, 7, TREE.topk, torch.float32, cpu.ops)
    rig, firsts, attach = sizing.Rig(model, drafter, (TREE, PLAIN), torch.float32, cpu), [], drafter.attach
    monkeypatch.setattr(drafter, "attach", lambda attn, first, size: (firsts.append(first), attach(attn, first, size)))
    sizing.trial(options(), rig, graph_size=0)
    made = make_executor(options(max_total_tokens=300), model, FLOAT32, cpu, drafter, rig.menu)
    assert firsts == [3, 3, 3]
    assert made.executor.attn.pool.layers == (KVSpec(2, 16), KVSpec(4, 32), KVSpec(1, 32), *draft.kv_layers)
    states = [StateSpec((width,), torch.float32) for width in (64, 96, 32)]
    assert draft.kv_layers == [states[0], KVSpec(2, 16), *states[1:]]


@pytest.fixture
def hybrid(harness, monkeypatch):
    """Of recurrent layers and attention, with 1 GB for their pool."""
    if harness.device != "cpu":
        pytest.skip("with a memory that the test makes up")
    model, cpu = harness.model_of(config_of(HYBRIDS["delta"], harness.CONTEXT)), pick_device("cpu")
    monkeypatch.setattr(type(cpu), "free_memory", lambda self: 4 * GB)
    return sizing.Rig(model, None, (TREE, PLAIN), torch.float32, cpu)


# Of a state: matrices and windows of three layers with 2 key heads, 4, 4 and 2 value heads.
STATE = 4 * (2 * (4 * 16 * 16 + 3 * 128) + 2 * 16 * 32 + 3 * 128)
SLOT = 2 * 2 * 16 * 4
# Of a row: two pages of nodes with the inputs, log decays and betas of these layers.
RECORDS = 2 * TREE.nodes * 4 * (3 * 128 + 2 * (4 + 4 + 2))


def test_states_take_their_share_of_the_pool(hybrid, monkeypatch):
    size = sizing.size_pool(options(state_memory_fraction=0.25), hybrid, 10**6, 0)
    assert size.states == (GB // 4 - 7 * RECORDS) // STATE, "six rows, and the dummy, have records"
    assert size.tokens == (GB - size.states * STATE - 7 * RECORDS) // SLOT
    few = sizing.size_pool(options(max_total_tokens=640, state_memory_fraction=0.9), hybrid, 10**6, 0)
    assert few == (640, 6 * 2 + 10), "two for each request, and one for every 64 tokens that are cached"
    assert sizing.size_pool(options(max_total_tokens=640), hybrid, 10**6, 0) == (640, 640 * SLOT // STATE)
    with pytest.raises(ConfigError, match=r"for 0 of .* at least: raise --state-memory-fraction"):
        sizing.size_pool(options(max_total_tokens=640, state_memory_fraction=0.01), hybrid, 10**6, 0)


@pytest.mark.parametrize("tokens", [None, 640, 5])
def test_a_model_that_keeps_nothing_of_tokens_has_room_for_states(harness, hybrid, tokens):
    """Mamba-2 without attention: of a pool of tokens no bytes follow."""
    model = harness.model_of(config_of(HYBRIDS["alone"], harness.CONTEXT))
    rig = hybrid._replace(model=model)
    each = 4 * (4 * 16 * 32 + 3 * 128) + 4 * (4 * 16 * 32 + 2 * 256)
    size = sizing.size_pool(options(max_total_tokens=tokens), rig, 1000, 0)
    assert size.tokens == (tokens or 2 * 6 * 1000)
    assert size.states == 6 * 2 + size.tokens // 64 and size.states * each < GB


def test_where_nothing_is_kept_of_tokens_all_memory_is_counted(harness, hybrid, monkeypatch):
    model = harness.model_of(config_of(HYBRIDS["alone"], harness.CONTEXT))
    rig, each = hybrid._replace(model=model), 4 * (4 * 16 * 32 + 3 * 128) + 4 * (4 * 16 * 32 + 2 * 256)
    records = 2 * TREE.nodes * 4 * (128 + 256 + 2 * (4 + 4))
    for budget in range(4 * each + 3 * records, 20 * each + 8 * records, 5000):
        monkeypatch.setattr(sizing, "CPU_POOL_BYTES", budget)
        size = sizing.size_pool(options(max_total_tokens=10), rig, 1000, 0)
        rows = sizing.rows_of(options(), size.states)
        assert 640 + size.states * each + (rows + 1) * records <= budget
    with pytest.raises(ConfigError, match=r"^--max-total-tokens 20000000: .* lower it"):
        sizing.size_pool(options(max_total_tokens=20_000_000), rig, 1000, 0)


def test_no_more_requests_run_than_have_states_and_records(hybrid):
    asked = options()
    for budget in range(3 * STATE + 2 * RECORDS, 12 * STATE + 7 * RECORDS, 1000):
        states = sizing.state_slots(asked, hybrid, budget, 640, RECORDS)
        rows = sizing.rows_of(asked, states)
        assert 1 <= rows <= 6 and states * STATE + (rows + 1) * RECORDS <= budget
        assert rows == 6 or (2 * STATE + RECORDS) * (rows + 1) + RECORDS > budget, "one more has room"
    with pytest.raises(ConfigError, match=r"for 2 of .* at least"):
        sizing.state_slots(asked, hybrid, 3 * STATE + 2 * RECORDS - 1, 640, RECORDS)


@pytest.mark.usefixtures("no_peak")
def test_an_engine_has_states_and_its_start_leaves_none(hybrid):
    sizing.trial(options(), hybrid, graph_size=4)
    made = make_executor(options(max_total_tokens=640), hybrid.model, FLOAT32, hybrid.device, None, hybrid.menu)
    states = made.executor.table.states
    assert made.states == 640 * SLOT // STATE == states.slots and states.nodes == TREE.nodes
    warm_up(made.executor, hybrid.menu, StepCost(hybrid.menu, False))
    for layer in states.layers.values():
        assert not layer.state[:-1].any() and layer.state[-1].any(), "all was the dummy's"


def test_graphs_of_mixed_steps_are_counted_where_there_will_be_any(rig, hybrid, on_cpu, monkeypatch):
    """Of a model whose layers need the host's chunks there are none."""
    other = sizing.Rig(
        on_cpu.model_of(config_of(KINDS["recurrent"], on_cpu.CONTEXT)), None, (TREE, PLAIN), torch.float32, rig.device
    )
    monkeypatch.setattr(sizing, "peak", lambda executor, plan: executor.commit(executor.launch(plan)).wait() and GB)
    found = [
        [sizing.trial(options(enable_mixed_chunk=on), one, 8)[1] for on in (False, True)]
        for one in (rig, hybrid, other)
    ]
    assert found[0][1] > found[0][0] + GB and found[1][1] > found[1][0] + GB and found[2][1] == found[2][0]


def test_a_draft_model_has_no_recurrent_layers(hybrid, harness):
    draft = DraftLM(harness.model_of(config_of(HYBRIDS["delta"], harness.CONTEXT)), harness.VOCAB)
    drafter = ModelDrafter(draft, 7, TREE.topk, torch.float32, hybrid.device.ops)
    with pytest.raises(ConfigError, match="recurrent layers"):
        make_executor(options(max_total_tokens=640), hybrid.model, FLOAT32, hybrid.device, drafter, hybrid.menu)


@pytest.mark.usefixtures("no_peak")
def test_the_trial_has_all_layers_run_over_whole_prompts(on_cpu, monkeypatch):
    """As for who asks for log probabilities of a prompt, where others' prompts end before layers that keep nothing."""
    model, rows = on_cpu.model_of(config_of(KINDS["shared"], on_cpu.CONTEXT)), []
    last, forward = model.layers[-1].mlp, GatedMLP.forward

    def counted(self, x, residual=None):
        rows.append(len(x) if self is last else 0)
        return forward(self, x, residual)

    monkeypatch.setattr(GatedMLP, "__call__", counted)
    sizing.trial(options(), sizing.Rig(model, None, (PLAIN,), torch.float32, pick_device("cpu")), graph_size=0)
    assert max(rows) == 20


def test_graphs_of_a_draft_model_take_memory_for_each_level(monkeypatch):
    monkeypatch.setattr(sizing, "peak", lambda executor, plan: 0)
    executor = SimpleNamespace(
        table=SimpleNamespace(rows=6), ops=SimpleNamespace(draws_by_row=True), common_shapes=tuple, head_slots=None,
        model=SimpleNamespace(needs_chunks=True, tower=None, config=SimpleNamespace(num_layers=3)),
        drafter=SimpleNamespace(from_tokens=True, kv_layers=[KVSpec(2, 16)] * 28),
    )  # fmt: skip

    def bytes_of(depth):
        return sizing.graph_bytes(executor, options(), (TreeShape(depth, 1, depth + 1),), 4, 20, 20, 100)

    # An H100 took 30 KB for a layer. For 1, 2 and 4 rows there are graphs.
    assert bytes_of(5) - bytes_of(1) > 3 * 4 * 28 * 30_000
    executor.drafter.from_tokens = False  # heads have a layer or two
    assert bytes_of(5) == bytes_of(1)


def test_the_trial_runs_the_largest_steps(rig, monkeypatch):
    ran = []

    def peak(executor, plan):
        result = executor.commit(executor.launch(plan)).wait()
        ran.append((plan.kind, plan.shape, len(plan.rows), sum(chunk.length for chunk in plan.chunks)))
        assert (result.count >= 1).all() and executor.table.tokens.max() < 48
        return [5 * GB, 7 * GB, 2 * GB, 3 * GB][len(ran) - 1]

    monkeypatch.setattr(sizing, "peak", peak)
    step, graphs = sizing.trial(options(), rig, graph_size=4)
    prompt = ("prefill", PLAIN, 1, 20)
    captured = ("prefill", PLAIN, 2, 32)  # the graph for prompts of 20 tokens has so many queries
    assert ran == [prompt, ("tree", TREE, 6, 0), ("tree", TREE, 4, 0), captured]
    assert step == 7 * GB and 3 * GB < graphs < 3.2 * GB
    assert not rig.drafter.index.memory.log.any() and not rig.drafter.index.match.any(), (
        "nothing of the trial is remembered"
    )
    ran.clear()
    assert sizing.trial(options(), rig, graph_size=0)[1] == 0 and len(ran) == 2
    ran.clear()
    sizing.trial(options(context_length=8), rig, graph_size=0)
    assert ran[0] == ("prefill", PLAIN, 3, 20), "a step shares its tokens among prompts"
    ran.clear()
    sizing.trial(options(context_length=2), rig, graph_size=0)
    assert ran[0] == ("prefill", PLAIN, 6, 12), "as many prompts as may run at once"


@pytest.fixture
def on_cuda(rig, monkeypatch):
    """A device of 80 GB with 60 free, on which a step takes 4 GB and graphs 1 GB; tables take 0.056 GB and as much as
    `request_bytes` says."""
    monkeypatch.setattr(sizing, "trial", lambda options, rig, size: (4 * GB, 1 * GB))
    monkeypatch.setattr(sizing, "request_bytes", lambda rows, vocab, length: [2 * GB, 0][length < 10**6])
    device = SimpleNamespace(
        ops=SimpleNamespace(table_dtype=torch.int32),
        has_own_memory=True,
        trim=lambda: None,
        free_memory=lambda: 60 * GB,
        total_memory=lambda: 80 * GB,
    )
    return rig._replace(device=device)


def test_the_pool_gets_what_steps_and_graphs_leave(on_cuda):
    slot = 2 * 2 * 2 * 16 * 4
    left = 60 * GB - 5 * GB - 2 * 4 * 7 * 10**6 - 2 * GB - 1.6 * GB
    assert sizing.size_pool(options(), on_cuda, 10**6, 8).tokens == int(left) // slot
    assert sizing.size_pool(options(hicache_size=1.0), on_cuda, 10**6, 8).tokens == int(left - 80 * GB / 64) // slot
    assert sizing.size_pool(options(max_total_tokens=77), on_cuda, 10**6, 8).tokens == 77
    assert sizing.size_pool(options(mem_fraction_static=0.5), on_cuda, 10**6, 8).tokens == 20 * GB // slot


def test_refusals_name_the_number_to_change(on_cuda):
    with pytest.raises(ConfigError, match=r"0\.95 leaves 4\.00 GB; lower it to 0\.94 or less.*--chunked-prefill-size"):
        sizing.size_pool(options(mem_fraction_static=0.95), on_cuda, 10**3, 8)
    with pytest.raises(
        ConfigError, match=r"--mem-fraction-static 0\.2 of 80\.00 GB leaves nothing.*20\.00 GB are taken"
    ):
        sizing.size_pool(options(mem_fraction_static=0.2), on_cuda, 10**3, 8)
    on_cuda.device.free_memory = lambda: 3 * GB
    with pytest.raises(
        ConfigError, match=r"3\.00 GB are free.* 4\.00 GB, CUDA graphs 1\.00 GB.*lower --chunked-prefill"
    ):
        sizing.size_pool(options(), on_cuda, 10**3, 8)


def test_a_step_that_does_not_fit(rig, monkeypatch):
    def peak(executor, plan):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(sizing, "peak", peak)
    with pytest.raises(
        ConfigError, match=r"20 prompt tokens, or of 6 requests with 8 nodes.*lower --chunked-prefill-size"
    ):
        sizing.trial(options(), rig, 0)


def test_tables_for_wishes_are_counted_at_their_largest():
    """The columns of `EditTable` and `PredictedOutput`, named here once more."""
    rows, vocab, length = 5, 1000, 5000
    biases, words, before, costs = 1024 * (8 + 4), 128 * 8, 128 * 15 * 8, 33 * 4
    row = 3 * 4 + 8 + biases + words + before + 32 * 4 + 2 * 8 * length + 4 * 8 + costs
    assert sizing.request_bytes(rows, vocab, length) == rows * row + 256 * 8


def test_rows_of_the_slot_table_have_lengths_that_kernels_are_compiled_for():
    assert [sizing.row_length(n) for n in (1, 16, 17, 4129)] == [16, 16, 32, 4144]


def test_a_start_says_what_memory_it_will_take(rig, monkeypatch, caplog):
    """Three layers, of which two keep a window's tokens, too."""
    monkeypatch.setattr(type(rig.device), "free_memory", lambda self: 5 * GB)
    monkeypatch.setattr(sizing, "resident_memory", lambda: 220 * 10**6)
    caplog.set_level(logging.INFO, "draftwing")
    config = rig.model.config
    sizing.log_forecast(options(), rig.device, config, torch.float32, GB)
    sizing.log_forecast(options(max_total_tokens=10**6), rig.device, config, torch.bfloat16, GB)
    slot = sizing.KVPool.bytes_per_slot(rig.model.kv_layers, torch.bfloat16)
    for line, pool in zip(caplog.messages, (GB, 10**6 * slot), strict=True):
        assert f"weights 1.00 GB, KV pool {pool / 1e9:.2f} GB" in line and "0.22 GB; 5.00 GB free" in line
    caplog.clear()
    sizing.log_forecast(options(), rig.device, config, torch.float32, 6 * GB)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


def test_weights_that_do_not_fit_are_refused_before_they_are_read(model, monkeypatch):
    monkeypatch.setattr(type(pick_device("cpu")), "memory_limit", lambda self: 10_000)
    with pytest.raises(CheckpointError, match=r"expected a model that fits into 0.0 GB of memory"):
        LLM(model, device="cpu", num_threads=1)
