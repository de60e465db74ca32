"""Adapters (LoRA) on the host: which there are by name, which of them lie in the slots of the device, and who waits.

Draft heads of their own lie in slots of their own, for one adapter may have several: under another name, or since one
was learnt. What is cached of a request is that of its head, too, so that no head reads what another one has made."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from draftwing.config.adapters import AdapterCard
from draftwing.errors import ConfigError, NotFound, RequestError
from draftwing.models.adapters.adapter import Adapter, digest_of, mixture
from draftwing.requests.request import GenerationRequest
from draftwing.sched.own_heads import OwnHeads
from draftwing.sched.req import Req

log = logging.getLogger("draftwing")
NOT_SERVED = "adapters are not served: start with --lora-modules or --lora-dir"
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


class EngineAdapters:
    """`add`, `remove`, `learn` and `hold` may come from any thread, all else is the engine's. Without slots none is
    served."""

    def __init__(
        self, slots: int, rank: int, put: Callable[[int, Adapter], None], put_head: Callable[[int, Adapter], None],
        salt_of: Callable[[GenerationRequest], int], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """rank: that slots have room for.  put: fills a slot of the device.  put_head: does so with a draft head of an
        adapter's own, of which there are as many slots.  salt_of: what requests must share to share what is cached."""
        self._served, self._rank, self._put, self._put_head = slots > 0, rank, put, put_head
        self._salt_of, self._clock = salt_of, clock
        self._lock = threading.Lock()
        self._named: dict[str, tuple[Adapter, AdapterCard]] = {}
        self._learnt: dict[str, Adapter] = {}  # draft heads in place of those that came with adapters of these digests
        self._kept: dict[str, Adapter] = {}  # by digest: those with a name, and those of requests
        self._places, self._heads = Places(slots), Places(slots)
        self._users: Counter[str] = Counter()  # requests by digest, that wait or run
        self._of: dict[str, tuple[str, Adapter | None]] = {}  # of each such request, by uid: digest, and its own head
        self._given: dict[str, Given] = {}  # by uid, to those that run
        self._judged = OwnHeads()
        self._waiting: deque[tuple[float, Req]] = deque()  # with since when
        self.loads = 0  # of slots

    def add(self, card: AdapterCard, adapter: Adapter, replace: bool = False) -> None:
        """Has an adapter under a name. Raises ConfigError where another one has it, unless that is to be replaced:
        requests that came before keep the one they have."""
        with self._lock:
            known = self._named.get(card.name)
            if known is not None and known[1].digest != card.digest and not replace:
                raise ConfigError(
                    f"the adapter {card.name!r} is there already, and is another one: unload it first, or ask for it "
                    "to be replaced (load_inplace)"
                )
            kept = self._kept.setdefault(card.digest, adapter)  # the same under another name, or before
            self._named[card.name] = dataclasses.replace(kept, head=adapter.head), card
            self._drop_unused()

    def learn(self, digest: str, head: Adapter | None) -> None:
        """Has requests to come with an adapter draft with this head, None: with that which came with it. Those that run
        go on with what they have."""
        with self._lock:
            self._learnt.pop(digest, None)
            if head is not None:
                self._learnt[digest] = head

    def remove(self, name: str) -> None:
        """Forgets a name; requests that have the adapter go on. Raises NotFound."""
        with self._lock:
            if self._named.pop(name, None) is None:
                raise self._unknown(name)
            self._drop_unused()

    def hold(self, asked: Sequence[tuple[str, float]], uid: str) -> str:
        """Returns the digest of an adapter, or of several as one, which is kept until the request of this uid has
        `ended`, whatever becomes of the names. Raises NotFound, and RequestError for a uid that has one already, or for
        more than a slot has room for. asked: names, and what scales are multiplied with."""
        with self._lock:
            parts = []
            for name, times in asked:
                known = self._named.get(name)
                if known is None:
                    raise self._unknown(name)
                parts.append((known[0], times))
            if uid in self._of:
                raise RequestError(f"uid: expected one of its own, found {uid!r}, which a live request has", "uid")
            digest = digest_of(parts)
            if digest not in self._kept:
                made = mixture(parts, digest)
                if made.rank > self._rank:
                    raise RequestError(
                        f"lora: expected adapters with a rank of at most {self._rank} together, found {made.rank}: "
                        f"start with --max-lora-rank {made.rank}", "lora",
                    )  # fmt: skip
                self._kept[digest] = made
            alone = parts[0][0] if digest == parts[0][0].digest else None
            self._of[uid] = digest, alone and self._learnt.get(digest, alone.head)
            self._users[digest] += 1
            return digest

    @property
    def cards(self) -> list[AdapterCard]:
        with self._lock:
            return [card for _, card in self._named.values()]

    @property
    def stats(self) -> dict[str, Any]:
        if not self._served:
            return {}
        return {"adapters": len(self._named), "adapters_on_device": len(self._places), "adapter_loads": self.loads}

    # -- requests ---------------------------------------------------------------------------------------------------

    def enter(self, req: Req) -> bool:
        """Takes a new request with an adapter, which is held; returns whether that has a slot now, which `req` gets.
        Others wait for `next`."""
        late = bool(self._waiting) and self._clock() - self._waiting[0][0] > PATIENCE
        if not late and self._give(req):
            return True
        self._waiting.append((self._clock(), req))
        return False

    def next(self) -> Req | None:
        """Returns the next of those that wait whose adapter has a slot now."""
        for i, (_, req) in enumerate(self._waiting):
            if self._give(req):
                del self._waiting[i]
                return req
            if i == 0 and self._clock() - self._waiting[0][0] > PATIENCE:
                return None
        return None

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
                digest, _ = self._of.pop(uid, ("", None))
                if not digest:
                    continue
                if (given := self._given.pop(uid, None)) is not None:
                    self._places.leave(digest)
                    if given.head:
                        self._heads.leave(given.head)
                    self._judge(given, meta)
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest]
                    self._drop_unused()

    def _give(self, req: Req) -> bool:
        digest, head = self._of[req.uid]
        place = self._places.take(digest)
        if place is None:
            return False
        req.adapter, new = place
        if new:
            self._put(req.adapter, self._kept[digest])
            self.loads += 1
        req.drafts_as, key = digest, "" if head is None else f"{digest}/{head.digest}"
        own = bool(key) and self._judged.next(key)
        self._given[req.uid] = Given(digest, "", "" if own else key)
        if own and head is not None and (place := self._heads.take(key)) is not None:
            req.head, new = place
            if new:
                self._put_head(req.head, head)
            req.drafts_as = key
            self._given[req.uid] = Given(digest, key, key)
            if req.salt == self._salt_of(req.request):  # else its client was forgotten meanwhile
                req.request = req.request._replace(adapter_digest=key)
                req.salt = self._salt_of(req.request)
        return True

    def judge_anew(self) -> None:
        """Forgets which draft heads are better, for the model's is another one now: what runs says nothing of that."""
        with self._lock:
            self._judged = OwnHeads()
            self._given = {uid: given._replace(judged="") for uid, given in self._given.items()}

    def _judge(self, given: Given, meta: Mapping[str, Any]) -> None:
        """Learns of a request that has ended how good its draft head is."""
        counts = meta.get("spec_num_correct_drafts", 0), meta.get("spec_verify_ct", 0)
        if given.judged and self._judged.ended(given.judged, bool(given.head), *counts) is False:
            names = [name for name, (_, card) in self._named.items() if card.digest == given.adapter]
            log.warning(
                "the adapters' own draft head of %s is accepted less often than the model's, which drafts in its place",
                ", ".join(map(repr, names)) or "an adapter that is not loaded any more",
            )  # fmt: skip

    def _drop_unused(self) -> None:
        named = {card.digest for _, card in self._named.values()}
        for digest in [one for one in self._kept if one not in named and not self._users[one]]:
            del self._kept[digest]

    def _unknown(self, name: str) -> NotFound:
        if not self._served:
            return NotFound(NOT_SERVED, "model")
        known = ", ".join(map(repr, list(self._named)[:8])) or "none"
        return NotFound(f"the adapter {name[:200]!r} is not loaded; there are {known}", "model", "model_not_found")
