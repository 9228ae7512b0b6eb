"""Amounts of CPU, memory and time as people write them, and as integers.

CPU is counted in millicores, memory in bytes, durations in seconds. Rules of Kubernetes quantities (`500m`, `4Gi`), of which these are a subset.
"""

from __future__ import annotations

import re

__all__ = ["cpu_millis", "duration_s", "format_bytes", "format_cpu", "format_duration", "memory_bytes"]

_MEMORY_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def cpu_millis(value: object) -> int:
    """`2`, `0.5`, `"500m"` → millicores. Raises ValueError("message; remedy")."""
    if isinstance(value, bool):
        raise ValueError("must be a number of cores; write 2, 0.5 or 500m")
    if isinstance(value, (int, float)):
        millis = value * 1000
    else:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(m?)", str(value)[:40])
        if not match:
            raise ValueError(f"{str(value)[:40]!r} is not a number of cores; write 2, 0.5 or 500m")
        millis = float(match[1]) * (1 if match[2] else 1000)
    if not 1 <= millis <= 1_024_000:  # the largest machines sold have a few hundred cores
        raise ValueError(f"must be from 0.001 to 1024 cores, got {str(value)[:40]}; correct the number")
    return round(millis)


def memory_bytes(value: object) -> int:
    """`"4Gi"`, `"512Mi"`, `2000000000` → bytes. Raises ValueError("message; remedy")."""
    match = None if isinstance(value, bool) else re.fullmatch(r"([0-9]{1,16}(?:\.[0-9]{1,3})?)([kMGT]?|[KMGT]i)", str(value)[:40])
    if not match or match[2] not in _MEMORY_UNITS:
        raise ValueError(f"{str(value)[:40]!r} is not an amount of memory; write 4Gi or 512Mi")
    amount = float(match[1]) * _MEMORY_UNITS[match[2]]
    if not 2**20 <= amount <= 64 * 2**40:
        raise ValueError(f"must be from 1Mi to 64Ti, got {str(value)[:40]}; correct the amount")
    return int(amount)


def duration_s(value: object) -> int:
    """`"90s"`, `"10m"`, `"2h"`, `"7d"`, `60` → whole seconds. Raises ValueError("message; remedy")."""
    match = None if isinstance(value, bool) else re.fullmatch(r"([0-9]{1,9})([smhd]?)", str(value)[:40])
    if not match:
        raise ValueError(f"{str(value)[:40]!r} is not a duration; write 90s, 10m, 2h or 7d")
    seconds = int(match[1]) * _DURATION_UNITS.get(match[2], 1)
    if not 1 <= seconds <= 366 * 86400:
        raise ValueError(f"must be from 1s to 366d, got {str(value)[:40]}; correct the duration")
    return seconds


def format_bytes(amount: int) -> str:
    """4294967296 → `4 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.4g} {unit}"
    return f"{amount} B"


def format_cpu(millis: int) -> str:
    """2000 → `2 CPU`."""
    return f"{millis / 1000:.4g} CPU"


def format_duration(seconds: float) -> str:
    """4000 → `1 h 6 min`; rounded to two units."""
    whole = max(0, round(seconds))
    parts = [(whole // 86400, "d"), (whole % 86400 // 3600, "h"), (whole % 3600 // 60, "min"), (whole % 60, "s")]
    shown = [f"{amount} {unit}" for amount, unit in parts if amount]
    return " ".join(shown[:2]) or "0 s"
