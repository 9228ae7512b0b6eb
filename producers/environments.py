"""Which environments exist, read once at an edge from Gymnasium's registry. Importing Gymnasium loads no torch."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["known_environments"]


def known_environments() -> Mapping[str, float | None]:
    """Ids that `gymnasium.make` knows here, with the mean return that counts as solved, where one is registered."""
    import gymnasium

    return {name: spec.reward_threshold for name, spec in gymnasium.registry.items()}
