"""Adapters (LoRA) on the host: which there are by name, which of them lie in the slots of the device, and who waits.

Draft heads of their own lie in slots of their own, for one adapter may have several: under another name, or since one
was learnt. What is cached of a request is that of its head, too, so that no head reads what another one has made."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.config.adapters import AdapterCard
from draftwing.engine.adapter_memory import AdapterMemory, HeadFile, Held
from draftwing.engine.startup.adapters import AdapterFiles
from draftwing.errors import CheckpointError, ConfigError, NotFound, RequestError
from draftwing.models.adapters.adapter import Adapter, digest_of, mixture
from draftwing.models.adapters.files import folder_of
from draftwing.requests.request import GenerationRequest
from draftwing.sched.own_heads import OwnHeads
from draftwing.sched.req import Req

log = logging.getLogger("draftwing")
NOT_SERVED = "adapters are not served: start with --lora-modules or --lora-dir"
GONE = "its files are gone or have changed since it was loaded: load it again (load_inplace)"
ONCE = "it could not be read again, the server's log says why: ask once more"
UNSERVED = CheckpointError, ConfigError  # what is wrong with files, for good
AHEAD = 64  # of those that wait, for whom something is read
PATIENCE = 2.0  # seconds that a request may wait for a slot before those with adapters that have one wait behind it


class Places:
    """Slots of the device, from 1 on, by what is in them. Whoever comes next gets the one that was not used for
    longest; a slot that a request has is nobody else's until that request ends."""

    def __init__(self, count: int) -> None:
        self._held: OrderedDict[str, int] = OrderedDict()  # the one that was taken last at the end
        self._free = list(range(count, 0, -1))
        self._users: Counter[str] = Counter()

    def __len__(self) -> int:
        """Returns how many have something in them."""
        return len(self._held)

    def __contains__(self, what: str) -> bool:
        return what in self._held

    def take(self, what: str) -> tuple[int, bool] | None:
        """Returns the slot that has this from now on, and whether it is to be filled; None: others are used in all.
        Each is to `leave` once."""
        slot, new = self._held.pop(what, None), False
        if slot is None:
            slot, new = self._free.pop() if self._free else self._evicted(), True
        if slot is None:
            return None
        self._held[what] = slot
        self._users[what] += 1
        return slot, new

    def leave(self, what: str) -> None:
        self._users[what] -= 1
        if not self._users[what]:
            del self._users[what]

    def _evicted(self) -> int | None:
        unused = next((what for what in self._held if what not in self._users), None)
        return None if unused is None else self._held.pop(unused)


class Given(NamedTuple):
    """What a request has. adapter: its digest.  head: of the adapter's own that drafts for it, "": the model's.
    judged: what the adapter's own head is known by, which is judged by this request; "": it is not."""

    adapter: str
    head: str
    judged: str


class Named(NamedTuple):
    """What a name stands for. ranks: of the adapter's matrices, by name.  head: that came with it."""

    card: AdapterCard
    ranks: Mapping[str, int]
    head: HeadFile | None


class EngineAdapters:
    """`add`, `remove`, `learn` and `hold` may come from any thread, all else is the engine's. Without slots none is
    served."""

    def __init__(
        self, slots: int, rank: int, put: Callable[[int, Adapter], None], put_head: Callable[[int, Adapter], None],
        salt_of: Callable[[GenerationRequest], int], clock: Callable[[], float], files: AdapterFiles | None = None,
        most: int | None = None, wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """rank: that slots have room for.  put: fills a slot of the device.  put_head: does so with a draft head of an
        adapter's own, of which there are as many slots.  salt_of: what requests must share to share what is cached.
        files: reads again.  most: adapters in memory of the host, and such heads; None: all.  wake: makes the engine
        turn, from any thread."""
        self._served, self._rank, self._put, self._put_head = slots > 0, rank, put, put_head
        self._salt_of, self._clock, self._files, self._most = salt_of, clock, files, most
        self._lock = threading.Lock()
        self._named: dict[str, Named] = {}
        self._learnt: dict[str, HeadFile] = {}  # in place of those that came with adapters of these digests
        self._memory, self._head_memory = AdapterMemory(most, wake), AdapterMemory(most, wake)
        self._places, self._heads = Places(slots), Places(slots)
        self._of: dict[str, Held] = {}  # of each request that waits or runs, by uid
        self._users: Counter[str] = Counter()  # of these, by digest
        self._given: dict[str, Given] = {}  # by uid, to those that run
        self._judged = OwnHeads()
        self._waiting: deque[tuple[float, Req]] = deque()  # with since when
        self.loads = 0  # of slots

    def add(self, card: AdapterCard, adapter: Adapter, replace: bool = False) -> None:
        """Has an adapter under a name. Raises ConfigError where another one has it, unless that is to be replaced:
        requests that came before keep the one they have."""
        ranks = {name: len(one.down) for name, one in adapter.factors.items()}
        with self._lock:
            known = self._named.get(card.name)
            if known is not None and known.card.digest != card.digest and not replace:
                raise ConfigError(
                    f"the adapter {card.name!r} is there already, and is another one: unload it first, or ask for it "
                    "to be replaced (load_inplace)"
                )
            self._memory.put(card.digest, dataclasses.replace(adapter, head=None))
            head = None
            if adapter.head is not None:
                head = HeadFile(adapter.head.digest, folder_of(Path(card.path)))
                self._head_memory.put(head.digest, adapter.head)
            self._named[card.name] = Named(card, ranks, head)
            self._drop_unused()

    def learn(self, digest: str, folder: Path | None, head: Adapter | None) -> None:
        """Has requests to come with an adapter draft with the head of this folder, None: with that which came with it.
        Those that run go on with what they have."""
        with self._lock:
            self._learnt.pop(digest, None)
            if head is not None and folder is not None:
                self._learnt[digest] = HeadFile(head.digest, folder)
                self._head_memory.put(head.digest, head)
            self._drop_unused()

    def remove(self, name: str) -> None:
        """Forgets a name; requests that have the adapter go on. Raises NotFound."""
        with self._lock:
            if self._named.pop(name, None) is None:
                raise self._unknown(name)
            self._drop_unused()

    def hold(self, asked: Sequence[tuple[str, float]], uid: str) -> str:
        """Returns the digest of an adapter, or of several as one, which the request of this uid has until it has
        `ended`, whatever becomes of the names. Raises NotFound, and RequestError for a uid that has one already, or for
        more than a slot has room for. asked: names, and what scales are multiplied with."""
        with self._lock:
            parts = []
            for name, times in asked:
                known = self._named.get(name)
                if known is None:
                    raise self._unknown(name)
                parts.append((known, times))
            if uid in self._of:
                raise RequestError(f"uid: expected one of its own, found {uid!r}, which a live request has", "uid")
            first, cards = parts[0][0], tuple((known.card, times) for known, times in parts)
            digest = digest_of([(card.digest, times) for card, times in cards])
            alone = digest == first.card.digest
            if not alone:
                self._mix(digest, parts)
            held = Held(digest, cards, self._learnt.get(digest, first.head) if alone else None)
            self._of[uid] = held
            self._users[digest] += 1
            self._memory.need(digest)
            if held.head is not None:
                self._head_memory.need(held.head.digest)
            return digest

    @property
    def cards(self) -> list[AdapterCard]:
        with self._lock:
            return [known.card for known in self._named.values()]

    @property
    def stats(self) -> dict[str, Any]:
        if not self._served:
            return {}
        return {
            "adapters": len(self._named), "adapters_on_device": len(self._places), "adapter_loads": self.loads,
            "adapters_in_memory": len(self._memory), "adapter_reads": self._memory.reads,
        }  # fmt: skip

    # -- requests ---------------------------------------------------------------------------------------------------

    def enter(self, req: Req) -> bool:
        """Takes a new request with an adapter, which is held; returns whether that has a slot now, which `req` gets.
        Others wait for `next`."""
        if not self._impatient() and self._give(req):
            return True
        self._waiting.append((self._clock(), req))
        return False

    def next(self) -> Req | None:
        """Returns the next of those that wait whose adapter has a slot now. Once there is none, what others lack is
        read."""
        for i, (_, req) in enumerate(self._waiting):
            if self._give(req):
                del self._waiting[i]
                return req
            if i == 0 and self._impatient():
                break
        self._fetch()
        return None

    def unreadable(self) -> Iterator[tuple[Req, str]]:
        """Yields those that wait, which they do not any more, for what could not be read again, and why in words. A
        draft head that could not be read drafts no more; the adapter is served without it."""
        if heads := self._head_memory.take_failed():
            self._forget_heads(set(heads), {digest for digest, why in heads.items() if isinstance(why, UNSERVED)})
        if not (failed := self._memory.take_failed()):
            return
        lost = [req for _, req in self._waiting if self._of[req.uid].digest in failed]
        self._waiting = deque(one for one in self._waiting if one[1] not in lost)
        for req in lost:
            held = self._of[req.uid]
            why = GONE if isinstance(failed[held.digest], UNSERVED) else ONCE
            yield req, f"the adapter {held.names} is not in memory any more (--max-cpu-loras {self._most}), and {why}"

    def drop(self, uid: str) -> Req | None:
        """Returns a request that waits, which does not any more."""
        for i, (_, req) in enumerate(self._waiting):
            if req.uid == uid:
                del self._waiting[i]
                return req
        return None

    def expired(self, now: float) -> list[Req]:
        """Returns those that have waited past their deadline, which they do not any more."""
        late = [req for _, req in self._waiting if req.deadline is not None and req.deadline <= now]
        self._waiting = deque(one for one in self._waiting if one[1] not in late)
        return late

    def __len__(self) -> int:
        """Returns how many requests wait."""
        return len(self._waiting)

    def ended(self, requests: Mapping[str, Mapping[str, Any]]) -> None:
        """Notes requests that gave out their last output, or never came. requests: by uid, what outputs say of them."""
        with self._lock:
            for uid, meta in requests.items():
                if (held := self._of.pop(uid, None)) is None:
                    continue
                if (given := self._given.pop(uid, None)) is None:
                    self._release(held)
                else:
                    self._places.leave(held.digest)
                    if given.head:
                        self._heads.leave(given.head)
                    self._judge(given, meta)
                self._users[held.digest] -= 1
                if not self._users[held.digest]:
                    del self._users[held.digest]
                    self._drop_unused()

    def _give(self, req: Req) -> bool:
        held = self._of[req.uid]
        if not self._at_hand(held) or (place := self._places.take(held.digest)) is None:
            return False
        req.adapter, new = place
        if new:
            self._put(req.adapter, self._in_memory(self._memory, held.digest))
            self.loads += 1
        else:
            self._memory.get(held.digest)  # it is used, and so others give way before it
        req.drafts_as, key, head = held.digest, held.head_key, held.head
        own = bool(key) and self._judged.next(key)
        self._given[req.uid] = Given(held.digest, "", "" if own else key)
        if own and head is not None and (place := self._heads.take(key)) is not None:
            req.head, new = place
            if new:
                self._put_head(req.head, self._in_memory(self._head_memory, head.digest))
            req.drafts_as = key
            self._given[req.uid] = Given(held.digest, key, key)
            if req.salt == self._salt_of(req.request):  # else its client was forgotten meanwhile
                req.request = req.request._replace(adapter_digest=key)
                req.salt = self._salt_of(req.request)
        self._release(held)
        return True

    def _impatient(self) -> bool:
        """Returns whether the first of those that wait has waited long for a slot alone."""
        if not self._waiting or self._clock() - self._waiting[0][0] <= PATIENCE:
            return False
        return self._at_hand(self._of[self._waiting[0][1].uid])

    # -- memory of the host -----------------------------------------------------------------------------------------

    def _at_hand(self, held: Held) -> bool:
        """Returns whether nothing of it is to be read first."""
        if held.digest not in self._places and held.digest not in self._memory:
            return False
        return not self._lacks_head(held)

    def _lacks_head(self, held: Held) -> bool:
        """Returns whether a draft head that may draft is to be read first."""
        if held.head is None or held.head_key in self._heads or held.head.digest in self._head_memory:
            return False
        return not self._judged.is_worse(held.head_key)

    def _in_memory(self, memory: AdapterMemory, digest: str) -> Adapter:
        found = memory.get(digest)
        assert found is not None, "what a request needs stays"
        return found

    def _fetch(self) -> None:
        """Has what those that wait lack be read, for the first of them first."""
        if self._most is None or self._files is None:
            return
        for i, (_, req) in enumerate(islice(self._waiting, AHEAD)):
            if self._memory.busy and self._head_memory.busy:
                return
            held = self._of[req.uid]
            if held.digest not in self._places and held.digest not in self._memory:
                self._memory.fetch(held.digest, partial(self._made, self._files, held), i == 0)
            head = held.head
            if head is not None and self._lacks_head(held):
                self._head_memory.fetch(head.digest, partial(self._files.head_again, head.folder, head.digest), i == 0)

    def _made(self, files: AdapterFiles, held: Held) -> Adapter:
        """Returns what a request has asked for, of files where it is not in memory. Raises CheckpointError."""
        parts = [(self._memory.get(card.digest) or self._again(files, card), times) for card, times in held.parts]
        if held.digest == parts[0][0].digest:
            return files.imaged(parts[0][0])
        return mixture(parts, held.digest)

    def _again(self, files: AdapterFiles, card: AdapterCard) -> Adapter:
        with self._lock:
            others = [known.card for known in self._named.values() if known.card.digest == card.digest]
        for one in others:
            with suppress(CheckpointError):  # the same adapter under another name lies elsewhere
                return files.again(one)
        return files.again(card)

    def _mix(self, digest: str, parts: Sequence[tuple[Named, float]]) -> None:
        """Makes one of several that are in memory, or one with another scale. Raises RequestError."""
        ranks = Counter[str]()
        for known, _ in parts:
            ranks.update(known.ranks)
        if (rank := max(ranks.values(), default=1)) > self._rank:
            raise RequestError(
                f"lora: expected adapters with a rank of at most {self._rank} together, found {rank}: "
                f"start with --max-lora-rank {rank}", "lora",
            )  # fmt: skip
        found = [(self._memory.get(known.card.digest), times) for known, times in parts]
        there = [(adapter, times) for adapter, times in found if adapter is not None]
        if digest not in self._memory and len(there) == len(parts):
            self._memory.put(digest, mixture(there, digest))

    def _release(self, held: Held) -> None:
        self._memory.release(held.digest)
        if held.head is not None:
            self._head_memory.release(held.head.digest)

    def _forget_heads(self, digests: set[str], for_good: set[str]) -> None:
        """Has those that wait draft with the model's head in place of these. for_good: which later requests do without,
        too."""
        with self._lock:
            for name, known in self._named.items():
                if known.head is not None and known.head.digest in for_good:
                    self._named[name] = known._replace(head=None)
                    log.warning("the draft head of the adapter %r is not used any more: load it again", name)
            self._learnt = {key: head for key, head in self._learnt.items() if head.digest not in for_good}
            for uid, held in self._of.items():
                if held.head is not None and held.head.digest in digests and uid not in self._given:
                    self._head_memory.release(held.head.digest)
                    self._of[uid] = held._replace(head=None)

    def judge_anew(self) -> None:
        """Forgets which draft heads are better, for the model's is another one now: what runs says nothing of that."""
        with self._lock:
            self._judged = OwnHeads()
            self._given = {uid: given._replace(judged="") for uid, given in self._given.items()}

    def _judge(self, given: Given, meta: Mapping[str, Any]) -> None:
        """Learns of a request that has ended how good its draft head is."""
        counts = meta.get("spec_num_correct_drafts", 0), meta.get("spec_verify_ct", 0)
        if given.judged and self._judged.ended(given.judged, bool(given.head), *counts) is False:
            names = [name for name, known in self._named.items() if known.card.digest == given.adapter]
            log.warning(
                "the adapters' own draft head of %s is accepted less often than the model's, which drafts in its place",
                ", ".join(map(repr, names)) or "an adapter that is not loaded any more",
            )  # fmt: skip

    def _drop_unused(self) -> None:
        named, held = self._named.values(), self._of.values()
        self._memory.keep({known.card.digest for known in named} | self._users.keys())
        heads = {*(known.head for known in named), *self._learnt.values(), *(one.head for one in held)}
        self._head_memory.keep({head.digest for head in heads if head is not None})

    def _unknown(self, name: str) -> NotFound:
        if not self._served:
            return NotFound(NOT_SERVED, "model")
        known = ", ".join(map(repr, list(self._named)[:8])) or "none"
        return NotFound(f"the adapter {name[:200]!r} is not loaded; there are {known}", "model", "model_not_found")
