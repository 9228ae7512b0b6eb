"""Freezes today's messages as the published ones, which every later change is compared with: part of making a release.

`python -m opentinker.schemas.publish schemas/published`. Refuses breaks that nobody has accepted; those that were accepted are history afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import compatibility
from .generate import write

__all__ = ["main"]


def main(directory: Path) -> int:
    """Write the documents; returns the exit code."""
    if any(directory.glob("*.json")) and compatibility.main(directory):
        return 1
    (directory / compatibility.ACCEPTED).unlink(missing_ok=True)
    paths = write(directory)
    print(f"{len(paths)} documents published in {directory}")  # noqa: T201 a command
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
