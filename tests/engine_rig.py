"""A tiny float32 model in a real engine, and drafters whose quality a test can choose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from decoder_configs import decoder_config
from thread_ranks import lead, shares_of

from draftwing.config.trees import MAX_CONFIDENCE, PLAIN
from draftwing.core import NO_DEFERRAL, Output, TokenLogprobs
from draftwing.engine.devices import pick_device
from draftwing.engine.draft_kv_backlog import ROOM, DraftKVBacklog
from draftwing.engine.executor import Executor
from draftwing.engine.loop import Loop, PageTableCheck
from draftwing.engine.row_table import RowTable
from draftwing.kv.pool import KVPool, RowStates, StateSpec, delta_specs
from draftwing.layers.linear_ops.blocks import BlockFormat
from draftwing.models.adapters.adapter import Adapter, AdapterSlots, AdapterTargets, Factors
from draftwing.models.adapters.heads import HeadSlots
from draftwing.models.decoder import WIDE, DecoderModel
from draftwing.models.loader import fill_parameters
from draftwing.models.weight_map import checkpoint_names, stored_tensors
from draftwing.ops.attention.spec import TorchAttention
from draftwing.ops.types import Draft
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.shape_policy import FixedShape, ShapePolicy
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.sched.state_slots import StateSizes
from draftwing.spec.lookup_drafter import NGramDrafter, SuffixDrafter

VOCAB = 48
CONTEXT = 128


def tiny_model(
    seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32, sharpen: float = 6.0, vocab: int = VOCAB,
    **switches,
):  # fmt: skip
    """switches: as `decoder_config` has them."""
    config = decoder_config(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        ffn_size=96, vocab_size=vocab, max_positions=CONTEXT, **switches,
    )  # fmt: skip
    return model_of(config, seed, device, dtype, sharpen)


def model_of(config, seed=0, device="cpu", dtype=torch.float32, sharpen=6.0):
    """A model with random weights."""
    model = DecoderModel(config, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    stored = {part.param for part in checkpoint_names(config).values()}  # others are as they are made
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name not in stored:
                continue
            if weight.dim() > 1 and not name.endswith("decay"):
                scale = sharpen if name.startswith("lm_head") else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale / weight.shape[-1] ** 0.5)
            elif name.endswith("mixer.norm"):
                weight.fill_(1)
            elif name.endswith(("end.scalar", "experts.scale")):
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            elif name.endswith("decay"):
                weight.copy_(-torch.rand(weight.shape, generator=generator))
            elif name.endswith("sinks"):
                weight.copy_(torch.randn(weight.shape, generator=generator) + 1)
            elif name.endswith(("norm.bias", "mlp.down.bias")):  # larger ones choose the tokens
                weight.copy_(torch.randn(weight.shape, generator=generator) / 32)
            elif not name.endswith("norm.weight"):  # biases, and vectors of a mixer
                weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
        for part in checkpoint_names(config).values():
            if part.order is not None:  # of which some rows are one in a checkpoint: gates of heads
                own = part.of(model.get_parameter(part.param))
                own.copy_(part.order.of(part.param, part.order.back(own)))
    return model.to(device=device, dtype=dtype).eval()


def in_blocks(model, ops):
    """The model with all its matrices in Q8_0, packed."""
    form = BlockFormat("Q8_0", ops)
    config = replace(model.config, weight_format=form, vocab_format=form)
    quantized = DecoderModel(config, torch.float32, "cpu")
    fill_parameters(quantized, checkpoint_names(config), stored_tensors(model, checkpoint_names(model.config)), "cpu")
    quantized.pack(ops)
    return quantized.eval()


def spread_rig(model, *args, drafter=None, **kw):
    """A `Rig` on all shares of a model; drafter: a name, or a function that makes it for a share."""
    shares = [model, *model.others]
    drafters = [drafter(share) if callable(drafter) else drafter for share in shares]
    rig, *others = [Rig(share, *args, drafter=own, **kw) for share, own in zip(shares, drafters, strict=True)]
    return lead(rig, others)


def spread(model, ops, expert_parallel=False):
    """Rank 0's share of a model, which knows the `others` and the `whole`."""
    first, *others = shares_of(model, ops, expert_parallel=expert_parallel)
    first.others, first.whole = others, (model,)
    return first


class OracleDrafter:
    """Knows the answers: `book[t0]` is the whole token sequence of the request whose first prompt token is t0.

    It proposes the true continuation on a branch whose place among its siblings moves with the position (so that
    later children get accepted too), wrong in `miss` of 8 positions, among decoys. It has one KV layer with a
    lookahead of one token, in which it keeps the pair (token, next token) of every position, and on every proposal
    counts the committed positions whose entry is not that pair: `wrong_kv` must stay 0.
    """

    def __init__(self, book: torch.Tensor, miss: int, lookahead: int = 1) -> None:
        kept = StateSpec((2,), torch.int64)
        self.aux_layers, self.lookahead, self.kv_layers, self.tail = (), lookahead, (kept,), 0
        self.reads_images = True  # so that what it is shown is asked for
        self.initial_confidence, self.fixed_confidence, self.from_tokens = MAX_CONFIDENCE, False, False
        self.book, self.miss = book, miss
        self.wrong_kv = torch.zeros((), dtype=torch.int64, device=book.device)

    def attach(self, attn, first_layer, positions):
        self.pool, self.layer = attn.pool, first_layer

    def span(self, shape):
        return max(shape.nodes, 1 + shape.topk * (shape.depth - 1))

    def propose(self, step):
        slots, rows, shape, max_kv_len, *_ = step
        kv_len, root = slots.kv_len[rows], slots.last[rows]
        self._check_kv(slots, rows, kv_len, max_kv_len)
        device, batch, nodes = rows.device, rows.shape[0], shape.nodes
        first = slots.tokens[rows, torch.zeros_like(rows)]
        topk = min(shape.topk, nodes - 1)
        node = torch.arange(1, nodes, device=device)
        level, child = (node - 1) // topk, (node - 1) % topk  # [N - 1]
        position = kv_len[:, None] + 1 + level  # [B, N - 1] where the node's token would stand
        # the true branch at this level, and at the level above (its node is the parent of the whole level)
        width = (nodes - 1 - level * topk).clamp(max=topk)
        lucky = (position * 5 + 3) % width
        above = (position - 1) * 5 + 3
        parent = torch.where(level == 0, 0, 1 + (level - 1) * topk + above % topk)
        truth = self.book[first[:, None], position.clamp(max=self.book.shape[1] - 1)]
        truth = torch.where(position % 8 < self.miss, (truth + 1) % VOCAB, truth)
        token = torch.where(child == lucky, truth, (truth + 1 + child) % VOCAB)
        alive = (level < shape.depth).expand(batch, -1)
        return Draft(
            torch.cat((root[:, None], token), 1),
            torch.cat((torch.zeros_like(root)[:, None], torch.where(alive, parent, 0)), 1),
            torch.cat((torch.ones_like(root, dtype=torch.bool)[:, None], alive), 1),
        )

    def skips_extend(self, shape):
        return shape == PLAIN

    def watch(self, seen):
        pass

    def catch_up(self, seen, drafts):
        self.extend(seen)

    def extend(self, seen):
        batch = seen.batch
        pairs = torch.stack((batch.ids, seen.next_ids), -1)
        self.pool.kv[self.layer].index_copy_(0, batch.write_slots, pairs)

    def confidence(self, slots, rows, max_kv_len, out=None):
        return (torch.empty_like(rows) if out is None else out).fill_(MAX_CONFIDENCE)

    def begin(self, step):
        return True  # neither edits nor grammars change what it proposes

    def constrain(self, slots, rows, banned, noisy):
        self.constrained = True  # it knows the answers, which are legal

    def flush(self):
        pass

    def _check_kv(self, slots, rows, kv_len, max_kv_len):
        max_kv_len = min(max_kv_len, slots.length - 1)
        at = torch.arange(max_kv_len, device=rows.device)
        pairs = self.pool.kv[self.layer][slots.page_table[rows, :max_kv_len]]  # [B, P, 2]
        tokens = slots.tokens[rows, : max_kv_len + 1]
        wrong = (pairs[..., 0] != tokens[:, :-1]) | (pairs[..., 1] != tokens[:, 1:])
        self.wrong_kv += (wrong & (at < kv_len[:, None])).sum()


@dataclass
class Answers:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    final: dict[str, Output] = field(default_factory=dict)


class InTurn(ShapePolicy):
    """Another shape each step."""

    sees_predictions, adapts = True, False

    def __init__(self, *menu):
        self.menu, self.steps = menu, -1

    def choose(self, load):
        self.steps += 1
        return self.menu[self.steps % len(self.menu)]

    def record(self, *step):
        pass


class Cycle(InTurn):
    """Plain decoding included."""

    adapts = True

    def __init__(self, *shapes):
        super().__init__(*shapes, PLAIN)


class Chosen(InTurn):
    """The shape that the test wants."""

    def __init__(self, *shapes):
        super().__init__(*shapes, PLAIN)
        self.shape = PLAIN

    def choose(self, load):
        return self.shape


class Rig:
    """A scheduler, an executor and a loop around a tiny model."""

    def __init__(
        self, model, shapes=(PLAIN,), drafter=None, lag=0, slots=1000, rows=6, chunk=64, radix=True, policy=None,
        book=None, miss=0, attn=None, device="cpu", fake_device=None, graph_size=0, ahead=0, kv_dtype=None,
        deferral=None, states=None, mixed=False, adapters=(), adapter_slots=None, heads=(),
    ):  # fmt: skip
        """attn: a backend of a pool, where it is not the CPU's own, or torch's elsewhere. graph_size: largest batch
        with graphs; on the CPU by a stand-in that calls the stages again. kv_dtype: of the pool, where it is not the
        model's. deferral: of prompts, where it is not what an engine on a CPU has. states: of a model with recurrent
        layers. mixed: whether prompts run beside rows that decode. adapters: in slots 1, 2, ...; with adapter_slots, of
        which there are so many then, in none. heads: of draft heads, in the same slots."""
        self.policy = policy or FixedShape(shapes[0])
        dev = fake_device or pick_device(device)
        layers = model.kv_layers
        dtype = next(model.parameters()).dtype
        image_token = model.config.image_token
        if drafter == "oracle":
            drafter = OracleDrafter(book.to(dev.device), miss)
        elif drafter == "ngram":
            drafter = NGramDrafter(capacity=4096, rows=rows + 1, ops=dev.ops, image_token=image_token)
        elif drafter == "suffix":
            drafter = SuffixDrafter(  # with one secret on all ranks
                capacity=4096, rows=rows + 1, ops=dev.ops, secret=1, image_token=image_token
            )
        self.drafter = drafter
        if deferral is None:
            deferral = (
                NO_DEFERRAL if dev.has_own_memory or fake_device else DraftKVBacklog.deferral(drafter, dev, chunk)
            )
        draft_layers = drafter.kv_layers if drafter is not None else ()
        self.pool = KVPool([*layers, *draft_layers], slots, kv_dtype or dtype, dev.device)
        menu = self.policy.menu
        if delta_specs(layers):
            states = states or StateSizes(4 * rows, 16, 4)
            nodes = max(shape.nodes for shape in menu)
            self.pool.states = RowStates.of(layers, states.slots, rows, nodes, model.dtype, dev.device, states.lazy)
        own = dev.ops.attention if device == "cpu" and fake_device is None else TorchAttention
        backend = (attn or own)(self.pool)
        spans = {s: s.nodes if drafter is None else drafter.span(s) for s in menu}
        max_span, max_commit = max(spans.values()), max(s.max_commit for s in menu)
        length = CONTEXT + max_span + max_commit + ROOM
        model.set_max_positions(length)
        self.slots = RowTable(rows, length, dev)
        self.executor = Executor(model, drafter, self.slots, backend, dev, graph_size, deferral=deferral, mixed=mixed)
        if adapters:
            count = len(adapters) if adapter_slots is None else adapter_slots
            held = AdapterSlots(model, count, max(one.rank for one in adapters), wide=WIDE)
            beside = HeadSlots(drafter.adaptable, count, max(one.rank for one in heads)) if heads else None
            self.executor.take_adapters(held, beside)
            for slot, own in enumerate(heads, 1):
                beside.put(slot, own)
            for slot, adapter in enumerate(adapters if adapter_slots is None else (), 1):
                held.put(slot, held.targets.fit(adapter))
        if dev.has_own_memory:  # a hidden host read is an error
            self.executor.launch = without_sync(self.executor.launch)
            self.executor.commit = without_sync(self.executor.commit)
        lookahead, tail, initial_confidence = 0, 0, 0
        if drafter is not None:
            drafter.attach(backend, len(layers), length)
            lookahead, tail, initial_confidence = drafter.lookahead, drafter.tail, drafter.initial_confidence
        config = SchedulerConfig(
            slots,
            rows,
            max_span,
            chunk,
            lookahead,
            tail,
            radix=radix,
            initial_confidence=initial_confidence,
            ahead=ahead,
            vocab=model.config.vocab_size,
            reads_images=drafter is not None and drafter.reads_images,
            skips_extend=frozenset(filter(drafter.skips_extend, menu)) if drafter is not None else frozenset(),
            deferral=deferral,
            states=states,
            mixes=self.executor.target.mixes if mixed else None,
        )
        self.sched = Scheduler(config, self.policy, spans)
        self.stats = SimpleNamespace(rows=0, tokens=0, shapes=set(), moved=0, prefills=0, mixed=0)
        self.loop = Loop(self.sched, self.executor, lag == 1, self._watch)
        self.page_table_check = PageTableCheck(self.sched, self.slots, every=1)
        if graph_size:
            if not dev.has_own_memory:
                dev.record = record_by_calling
            self.captured = self.executor.captures.capture(self.executor.common_shapes(menu))

    def _watch(self, plan, result):
        if plan.kind == "prefill":
            self.stats.prefills += 1
            self.stats.mixed += plan.mixed
            return
        self.stats.rows += len(plan.rows)
        self.stats.tokens += int(result.count.sum())
        self.stats.shapes.add(plan.shape)
        self.stats.moved += int((result.order != range(plan.shape.nodes)).any(1).sum())

    @property
    def accept_length(self):
        return self.stats.tokens / max(self.stats.rows, 1)

    def submit(self, *args, **kw):
        req = self.request(*args, **kw)
        self.sched.submit(req)
        return req

    def request(self, uid, prompt, params, stop_ids=(), priority=0, salt=0, scanner=None, deadline=None, **more):
        room = CONTEXT - len(prompt)
        wanted = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
        names = "logprobs", "limits", "prediction", "traced", "thinking", "bad_word_ids", "images", "adapter_digest"
        asked = {name: more.pop(name) for name in names if name in more}
        return Req(
            GenerationRequest(uid, list(prompt), params, priority, **asked), seed=params.sampling_seed or 0,
            max_total=len(prompt) + wanted, stop_ids=frozenset((*stop_ids, *params.stop_token_ids)), salt=salt,
            scanner=scanner, deadline=deadline, **more,
        )  # fmt: skip

    def answer(self, prompts, params, **how):
        """Submits prompts as requests "0", "1" and so on, and runs."""
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            self.submit(str(i), prompt, param)
        return self.run(**how)

    def run(self, answers=None, turns=100_000, between=None):
        """Turns the loop until everything is answered, checking who owns what after every commit."""
        answers = answers or Answers()
        for turn in range(turns):
            if self.loop.idle:
                break
            self.loop.turn()
            self.sched.check_integrity()
            self.page_table_check.look()
            for out in self.sched.take_outputs():
                answers.tokens.setdefault(out.uid, []).extend(out.token_ids)
                answers.logprobs.setdefault(out.uid, []).extend(out.logprobs)
                if out.prompt_logprobs:
                    answers.prompt_logprobs[out.uid] = out.prompt_logprobs
                if out.finish_reason:
                    answers.final[out.uid] = out
            if between is not None:
                between(turn)
        assert self.loop.idle
        if hasattr(self, "agree"):
            assert self.agree() or turn < 2
        if isinstance(self.drafter, OracleDrafter):
            assert int(self.drafter.wrong_kv) == 0, "the drafter's KV does not belong to the committed tokens"
        return answers


def record_by_calling(fn, pool=""):
    """`Device.record` without graphs: a replay calls the function and puts what it gives where the first call's
    results are. As with graphs, nobody sees the tensors of a call but through them."""

    def kept(value):
        if isinstance(value, torch.Tensor):
            return value.clone()
        if hasattr(value, "_fields"):
            return type(value)(*map(kept, value))
        return tuple(map(kept, value)) if isinstance(value, tuple) else value

    def put(into, value):
        if isinstance(value, torch.Tensor):
            into.copy_(value)
        elif isinstance(into, tuple):
            for a, b in zip(into, value, strict=True):
                put(a, b)

    static = kept(fn())
    return lambda: put(static, fn()), static


def without_sync(stage):
    """The stage with every implicit synchronisation between host and device an error."""

    def run(*args):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return stage(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return run


def prompts_for(count, seed=0, shortest=3, longest=20):
    """Prompts with distinct first tokens (the oracle's key) that share stretches of text in pairs."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(0, VOCAB, (longest,), generator=generator).tolist()
    out = []
    for i in range(count):
        length = int(torch.randint(shortest, longest, (1,), generator=generator))
        tail = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        out.append([i, *(common[: length // 2] if i % 2 else []), *tail][:longest])
    return out


def greedy(tokens=40, **kw):
    return SamplingParams(max_new_tokens=tokens, temperature=0.0, **kw)


def seeded(tokens=40, seed=7, **kw):
    return SamplingParams(max_new_tokens=tokens, **{"temperature": 0.8, "sampling_seed": seed, **kw})


def answers_without_speculation(model, prompts, params, **kw):
    """Four at a time, in the reverse order: nobody has the row and the neighbours that it has where tests ask the same,
    so that text which depends on them is noticed. And the first one alone, for what goes wrong in every batch."""
    (model,) = getattr(model, "whole", (model,))
    rig = Rig(model, rows=4, radix=False, **kw)
    for i, (prompt, param) in reversed([*enumerate(zip(prompts, params, strict=True))]):
        rig.submit(str(i), prompt, param)
    found = rig.run()
    if len(prompts) > 1:
        alone = Rig(model, rows=1, radix=False, **kw).answer(prompts[:1], params[:1])
        assert alone.tokens["0"] == found.tokens["0"], "the text of a request depends on others"
    return found


def make_book(prompts, answers, length=CONTEXT + 64):
    """What the oracle knows: row t0 holds the request whose first prompt token is t0."""
    book = torch.zeros(VOCAB, length, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        whole = torch.tensor([*prompt, *answers.tokens[str(i)]])
        book[prompt[0], : len(whole)] = whole
    return book


def adapters_for(model, ranks=(4, 7, 2), seed=0, strength=0.7):
    """Random adapters, each of some of the model's matrices."""
    generator, found = torch.Generator().manual_seed(seed), []
    for i, rank in enumerate(ranks):
        factors = {}
        for j, (name, target) in enumerate(AdapterTargets(model, WIDE).targets.items()):
            if (i + j) % 3 or i == 0:
                down = torch.randn(rank, target.inputs, generator=generator) / target.inputs**0.5
                up = torch.randn(target.outputs, rank, generator=generator) * strength / rank**0.5
                factors[name] = Factors(down, up, 1.0 + i / 4)
        found.append(Adapter(factors, f"adapter {i}"))
    return found


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
TORCH, BLOCKS, RANKS, EXPERT_RANKS = (
    pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "blocks", "ranks", "ranks with whole experts")
)
