"""The operations of layers, in torch."""

from __future__ import annotations


class LayerOps:
    """Norms, gated activation, rows of a table, GEMMs."""
