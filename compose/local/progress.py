"""What `up` and `down` show while they work: a line a program, plain where output is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Protocol

__all__ = ["PlainProgress", "Progress", "SilentProgress", "TerminalProgress", "progress_for_output"]


class Progress(Protocol):
    """Where news of a running `up` or `down` goes."""

    def say(self, text: str) -> None: ...

    def done(self, name: str, word: str) -> None: ...


class SilentProgress:
    """For tests and for other programs."""

    def say(self, text: str) -> None:
        """Nothing."""

    def done(self, name: str, word: str) -> None:
        """Nothing."""


class PlainProgress:
    """Lines for a log."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:5.1f} s] {text}", flush=True)

    def done(self, name: str, word: str) -> None:
        self.say(f"{name} {word}")


class TerminalProgress:
    """Colour and alignment for a person."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._started:5.1f} s[/dim]  {text}")

    def done(self, name: str, word: str) -> None:
        self.say(f"[green]✔[/green] [bold]{name}[/bold] {word}")


def progress_for_output() -> Progress:
    return TerminalProgress() if sys.stdout.isatty() else PlainProgress()
