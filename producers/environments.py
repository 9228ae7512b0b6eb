"""Which environments exist, read once at an edge from Gymnasium's registry. Importing Gymnasium loads no torch."""

from __future__ import annotations

__all__ = ["environment_ids"]


def environment_ids() -> frozenset[str]:
    """Ids that `gymnasium.make` knows here."""
    import gymnasium

    return frozenset(gymnasium.registry)
