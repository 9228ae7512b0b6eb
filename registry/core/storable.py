"""Foreign values as PostgreSQL can hold them: no NUL characters, no NaN in JSON."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["storable"]

_DEPTH_MAX = 64


def storable(value: Any, depth: int = 0) -> Any:
    """The same value with NUL characters replaced and non-finite numbers as text. Raises ValueError below 64 levels."""
    if depth > _DEPTH_MAX:
        raise ValueError("is nested too deeply; flatten it")
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {storable(str(key), depth): storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(item, depth + 1) for item in value]
    return value
