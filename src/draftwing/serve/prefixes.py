"""Ray's router for cached prefixes, where it chooses a replica for HAProxy instead of handing on the request itself."""

from __future__ import annotations

from typing import Any

# The class that `ray.serve.llm.request_router` makes public. That package cannot be imported without vLLM or SGLang.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


class PrefixRouter(PrefixCacheAffinityRouter):
    """A request that Ray does not hand on is not seen to begin or to end. So replicas are asked how busy they are each
    time, the less busy one of those that will do is taken, and what was chosen is remembered at once."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Returns the replica for a request, as the only one of the first rank; without a text as Ray does."""
        known = self.replica_queue_len_cache
        for one in candidate_replicas:
            known.invalidate_key(one.replica_id)
        ranks: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or not pending_request.args or not ranks or not ranks[0]:
            return ranks
        chosen = min(ranks[0], key=lambda one: known.get(one.replica_id) or 0)
        self.on_request_routed(pending_request, chosen.replica_id, None)
        return [[chosen]]
