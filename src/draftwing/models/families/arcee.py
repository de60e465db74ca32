"""Arcee's AFM: Llama with MLPs without a gate, whose activation is the square of ReLU."""

from __future__ import annotations

from draftwing.models.family import Family, InGGUF

FAMILIES = {
    "ArceeForCausalLM": Family("arcee", eps=1e-5, activation="relu2", gguf=InGGUF("arcee", permuted=True)),
}
