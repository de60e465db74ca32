"""A client's slots, of which llama.cpp's `/slots` saves one under a name, restores it and erases it.

A slot is the text of the client's last request with that `id_slot`. To save one is to write what waits of it
(`SavedPrefixes.write_slot`), and to have its blocks stay under a name; to restore one, to look at these blocks: the
next request finds them as any others.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from draftwing.engine.cached_texts import SavedText
from draftwing.errors import RequestError
from draftwing.kv.named_prefixes import check_filename
from draftwing.kv.prefix_index import BLOCK, owner_of, reachable, state_digest
from draftwing.kv.prefix_store import PrefixStore

MOST_SLOTS = 4096  # of all clients, whose texts are remembered
Slot = tuple[bytes, int]  # its owner, and its `id_slot`


class SlotFiles(NamedTuple):
    """What is on the disk of a slot. blocks, state: digests.  size: bytes."""

    blocks: tuple[bytes, ...]
    state: bytes | None
    size: int

    @property
    def tokens(self) -> int:
        return BLOCK * len(self.blocks)


class SavedSlots:
    """Any thread may call it; what says so, with the lock alone."""

    def __init__(self, store: PrefixStore, lock: threading.Lock, most: int, stateful: bool) -> None:
        """lock: of the store.  most: tokens of texts.  stateful: whether requests begin with a snapshot."""
        self._store, self._lock, self._most, self._stateful = store, lock, most, stateful
        # The last used behind; texts with all their tokens, or what was restored.
        self._held: OrderedDict[Slot, SavedText | SlotFiles] = OrderedDict()

    # -- with the lock ------------------------------------------------------------------------------------------------

    def hold(self, slot: Slot, what: SavedText | SlotFiles) -> None:
        """Has a slot hold a text, or what was restored."""
        if slot[1] < 0:
            return
        self._held[slot] = what
        self._held.move_to_end(slot)
        size = sum(len(one.keys) for one in self._held.values() if isinstance(one, SavedText))
        while len(self._held) > 1 and (size > self._most or len(self._held) > MOST_SLOTS):
            gone = self._held.popitem(last=False)[1]
            size -= len(gone.keys) if isinstance(gone, SavedText) else 0

    def empty(self, slot: Slot) -> SavedText | SlotFiles | None:
        """Returns what the slot held."""
        return self._held.pop(slot, None)

    def forget(self, owner: bytes | None = None) -> None:
        """Empties an owner's slots; None: all."""
        for slot in [one for one in self._held if owner in (None, one[0])]:
            del self._held[slot]

    # -- without it ---------------------------------------------------------------------------------------------------

    def act(
        self, action: str, client: str, slot: int, name: str, write: Callable[[SavedText], bool]
    ) -> tuple[int, int]:
        """Saves a client's slot, restores one or erases it. Returns tokens and bytes. write: writes some of a text, and
        returns whether all of it is on the disk.  Raises RequestError and OSError."""
        if action == "erase":
            return self.erase(client, slot, name), 0
        if action == "restore":
            found = self.restore(client, slot, name)
        else:
            check_filename(name)  # before anything is written
            what = self.held(client, slot)
            while isinstance(what, SavedText) and not write(what):
                time.sleep(0.001)  # else this thread could have the lock again before the one that turns the engine
            found = self.save(client, what, name)
        return found.tokens, found.size

    def held(self, client: str, slot: int) -> SavedText | SlotFiles:
        """Returns what is in a client's slot. Raises RequestError."""
        with self._lock:
            found = self._held.get((owner_of(client), slot))
        if found is None:
            raise RequestError(
                f"slot {slot} is empty: no request of yours with id_slot {slot} has ended since the start that may be "
                f"kept and has {BLOCK} tokens",
                "id_slot",
            )
        return found

    def save(self, client: str, what: SavedText | SlotFiles, name: str) -> SlotFiles:
        """Has what is on the disk of a slot stay there under a name. Raises RequestError where that is nothing, as
        `PrefixStore.save`, and OSError."""
        with self._lock:
            found = self._files(what.digests if isinstance(what, SavedText) else what.blocks)
            if not found.blocks:
                raise RequestError(
                    "nothing of the slot could be kept: it is too short, its place in the cache was needed for others, "
                    "or --prefix-cache-size is too small",
                    "id_slot",
                )
            return found._replace(size=self._store.save(owner_of(client), name, found.blocks, found.state))

    def restore(self, client: str, slot: int, name: str) -> SlotFiles:
        """Reads what was saved under a name, and has a slot hold it. Raises RequestError and OSError."""
        owner, size, whole = owner_of(client), 0, list[bytes]()
        with self._lock:
            named = self._store.saved(owner, name)
            self._store.refresh()
        for digest in named.digests:
            with self._lock:  # by one at a time, so that requests come in between
                data = self._store.read(digest)
            if data is None:
                break
            size += len(data)
            whole.append(digest)
        with self._lock:
            found = self._files([one for one in whole if one != named.state])._replace(size=size)
            if not found.blocks:
                raise RequestError(
                    "filename: nothing of it is left; its prompt has to be prefilled once more", "filename"
                )
            self._store.use([*found.blocks, *([] if found.state is None else [found.state])])
            self.hold((owner, slot), found)
        return found

    def erase(self, client: str, slot: int, name: str) -> int:
        """Empties a slot; with a name, removes what was saved under it in place of that. Returns how many tokens there
        were. Raises RequestError and OSError."""
        with self._lock:
            if name:
                return BLOCK * len(self._store.unsave(owner_of(client), name).blocks)
            gone = self.empty((owner_of(client), slot))
        return 0 if gone is None else len(gone.keys) if isinstance(gone, SavedText) else gone.tokens

    def _files(self, digests: list[bytes] | tuple[bytes, ...]) -> SlotFiles:
        blocks = reachable(digests, [self._store], self._stateful)
        return SlotFiles(tuple(blocks), state_digest(blocks[-1]) if blocks and self._stateful else None, 0)
