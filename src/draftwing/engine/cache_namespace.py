"""What requests share: which of them may meet in the prefix cache and in the memories of drafters."""

from __future__ import annotations

import json
import secrets
from hashlib import blake2b

from draftwing.requests.request import GenerationRequest


class CacheNamespaces:
    """Requests share what has the same salt: those of one client with the same `cache_salt`.

    Salts are hashes under a key that nobody outside knows, so no client can choose a `cache_salt` whose hash meets
    another's, and drafters may take them for secrets.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, request: GenerationRequest) -> int:
        """63 bits; 0 where there is neither a client's name nor a `cache_salt`."""
        if not request.client and request.cache_salt is None:
            return 0
        return self._hash([request.client, request.cache_salt])

    def of_drafts(self, request: GenerationRequest, show_texts: bool) -> int:
        """Returns a namespace of drafters' memories. A request that gets drafts would see whatever they come from, so
        its own is a salt that no other request has, unless texts may be shown."""
        if request.traced and not show_texts:
            return self._hash(secrets.token_hex(16))
        return self.of(request)

    def _hash(self, value: object) -> int:
        data = json.dumps(value).encode()
        return (int.from_bytes(blake2b(data, digest_size=8, key=self._key).digest(), "big") >> 1) or 1
