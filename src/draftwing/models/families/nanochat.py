"""NanoChat: norms without weights, also of embeddings, and of heads when they are turned, the other way round; MLPs by
the square of ReLU."""

from __future__ import annotations

from draftwing.models.family import Family

_CAP = "final_logit_softcapping"

FAMILIES = {
    "NanoChatForCausalLM": Family(
        "nanochat",
        qk_norm=True,
        norms_after=True,
        bare_norms=True,
        reversed=True,
        normed_embeddings=True,
        activation="relu2",
        soft_cap=True,
        mlp_bias=False,
        sliding_window=None,
        keys=lambda fields: {} if fields.has(_CAP) else {_CAP: 15.0},
        layer_names={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    ),
}
