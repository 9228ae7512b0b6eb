"""A local stack of one's own: in a temporary home, on ports of its own, gone afterwards. For tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import UpOptions, settings_of
from opentinker.compose.local.progress import SilentProgress
from opentinker.compose.local.stack import down, up
from opentinker.compose.runtime.settings import Settings

__all__ = ["Stack", "clean_environment", "own_stack"]


def clean_environment(home: Path, **additions: str) -> dict[str, str]:
    """This process's environment for a child; of our settings only the home and what is added."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENTINKER_")}
    return inherited | {"OPENTINKER_HOME": str(home)} | additions


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running local stack."""

    home: Path
    settings: Settings

    def environment(self, **additions: str) -> dict[str, str]:
        """For a child process that is to find this stack."""
        return clean_environment(self.home, **additions)


@contextmanager
def own_stack(*only: str) -> Iterator[Stack]:
    """These parts, or all if none is named. Raises StackError if they cannot be had; they end with the block, or with this process, however it ends."""
    home = Home(Path(tempfile.mkdtemp(prefix="opentinker-test-")))
    try:
        up(home, UpOptions(only=only, usual_ports=False, ends_with_caller=True), SilentProgress())
        yield Stack(home=home.root, settings=settings_of(home.root))
    finally:
        down(home, SilentProgress())
        shutil.rmtree(home.root, ignore_errors=True)
