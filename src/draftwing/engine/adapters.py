"""Adapters (LoRA) on the host: which there are by name, which of them lie in the slots of the device, and who waits.

Slots are given to whoever comes next, the one that was not used for longest first; a slot that a request has is nobody
else's until that request ends."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwing.config.adapters import AdapterCard
from draftwing.errors import ConfigError, NotFound, RequestError
from draftwing.models.adapters.adapter import Adapter, digest_of, mixture
from draftwing.sched.own_heads import OwnHeads
from draftwing.sched.req import Req

log = logging.getLogger("draftwing")
NOT_SERVED = "adapters are not served: start with --lora-modules or --lora-dir"
PATIENCE = 2.0  # seconds that a request may wait for a slot before those with adapters that have one wait behind it


class EngineAdapters:
    """`add`, `remove` and `hold` may come from any thread, all else is the engine's. Without slots none is served."""

    def __init__(
        self, slots: int, rank: int, put: Callable[[int, Adapter], None],
        put_head: Callable[[int, Adapter | None], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """rank: that slots have room for.  put: fills a slot of the device, from 1 on.  put_head: does so with the
        adapter's own draft head alone, whatever runs."""
        self._served, self._rank, self._put, self._put_head, self._clock = slots > 0, rank, put, put_head, clock
        self._lock = threading.Lock()
        self._named: dict[str, tuple[Adapter, AdapterCard]] = {}
        self._kept: dict[str, Adapter] = {}  # by digest: those with a name, and those of requests
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest, the one that was used last at the end
        self._heads: dict[str, str] = {}  # digests of the draft heads in these
        self._free = list(range(slots, 0, -1))
        self._users: Counter[str] = Counter()  # requests by digest, that wait or run
        self._of: dict[str, str] = {}  # digest of the adapter of each such request, by uid
        self._running: Counter[str] = Counter()  # of these those that have a slot
        # By uid: what the adapter's own draft head is known by, "" without one, and whether the request has it.
        self._has_slot: dict[str, tuple[str, bool]] = {}
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
            self._named[card.name] = adapter, card
            self._kept[card.digest] = adapter
            self._drop_unused()

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
            self._of[uid] = digest
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
        return {"adapters": len(self._named), "adapters_on_device": len(self._slots), "adapter_loads": self.loads}

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
                digest = self._of.pop(uid, None)
                if digest is None:
                    continue
                if uid in self._has_slot:
                    self._judge(*self._has_slot.pop(uid), meta)
                    self._running[digest] -= 1
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest], self._running[digest]
                    self._drop_unused()

    def _give(self, req: Req) -> bool:
        digest = req.request.adapter_digest
        adapter = self._kept[digest]
        if digest not in self._slots:
            slot = self._free.pop() if self._free else self._evicted()
            if slot is None:
                return False
            self._put(slot, adapter)
            self.loads += 1
            self._slots[digest] = slot
        elif self._heads[digest] != adapter.head_digest:
            self._put_head(self._slots[digest], adapter.head)
        self._heads[digest] = adapter.head_digest
        self._slots.move_to_end(digest)
        req.adapter = self._slots[digest]
        key = f"{digest}/{adapter.head_digest}" if adapter.head is not None else ""
        own = bool(key) and self._judged.next(key)
        req.head, req.drafts_as = (req.adapter, key) if own else (0, digest)
        self._running[digest] += 1
        self._has_slot[req.uid] = key, own
        return True

    def judge_anew(self) -> None:
        """Forgets which draft heads are better, for the model's is another one now: what runs says nothing of that."""
        with self._lock:
            self._judged = OwnHeads()
            self._has_slot = dict.fromkeys(self._has_slot, ("", False))

    def _judge(self, key: str, own: bool, meta: Mapping[str, Any]) -> None:
        """Learns of a request that has ended how good its draft head is."""
        counts = meta.get("spec_num_correct_drafts", 0), meta.get("spec_verify_ct", 0)
        if key and self._judged.ended(key, own, *counts) is False:
            names = [name for name, (_, card) in self._named.items() if key.startswith(f"{card.digest}/")]
            log.warning(
                "the adapters' own draft head of %s is accepted less often than the model's, which drafts in its place",
                ", ".join(map(repr, names)) or "an adapter that is not loaded any more",
            )  # fmt: skip

    def _evicted(self) -> int | None:
        """Returns the slot that nobody has used for longest, of those that no request has; None: each has one."""
        for digest in self._slots:
            if not self._running[digest]:
                del self._heads[digest]
                return self._slots.pop(digest)
        return None

    def _drop_unused(self) -> None:
        named = {card.digest for _, card in self._named.values()}
        for digest in [one for one in self._kept if one not in named and not self._users[one]]:
            del self._kept[digest]

    def _unknown(self, name: str) -> NotFound:
        if not self._served:
            return NotFound(NOT_SERVED, "model")
        known = ", ".join(map(repr, list(self._named)[:8])) or "none"
        return NotFound(f"the adapter {name[:200]!r} is not loaded; there are {known}", "model", "model_not_found")
