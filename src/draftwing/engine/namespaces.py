"""Which requests share what is cached and remembered."""

from __future__ import annotations

import json
import secrets
from hashlib import blake2b

from draftwing.requests.request import GenerationRequest


class CacheNamespaces:
    """Requests share what has the same salt: those of one client with the same `cache_salt` and the same adapter.

    Salts are hashes under a key that nobody outside knows, so no client can choose a `cache_salt` whose hash meets
    another's, and drafters may take them for secrets.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._forgotten: dict[str, int] = {}  # how often each client was that has ever asked

    def of(self, request: GenerationRequest) -> int:
        """Returns 63 bits; 0 where there is neither a client's name, nor a `cache_salt`, nor an adapter."""
        return self.named(request.client, request.cache_salt, request.adapter_digest)

    def named(self, client: str, cache_salt: str | None, adapter: str = "") -> int:
        """Returns `of` a request of this client with this `cache_salt`. adapter: its digest."""
        forgotten = self._forgotten.setdefault(client, 0)
        if not client and cache_salt is None and not forgotten and not adapter:
            return 0
        return self._hash([client, cache_salt, forgotten, *([adapter] if adapter else [])])

    def forget(self, client: str) -> None:
        """Lets the client's requests share nothing with those before from now on."""
        if client in self._forgotten:
            self._forgotten[client] += 1

    def of_drafts(self, request: GenerationRequest, show_texts: bool) -> int:
        """Returns a namespace of drafters' memories. A request that gets drafts would see whatever they come from, so
        its own is a salt that no other request has, unless texts may be shown."""
        if request.traced and not show_texts:
            return self._hash(secrets.token_hex(16))
        return self.of(request)

    def _hash(self, value: object) -> int:
        data = json.dumps(value).encode()
        return (int.from_bytes(blake2b(data, digest_size=8, key=self._key).digest(), "big") >> 1) or 1
