"""Which ports a stack uses: asked-for ones as they are, kept ones again, else the usual one if it is free, else the next free one.

`choose_ports` decides from values. `reserve_ports` adds the machine: two homes that start at the same moment must not choose the same port,
so the choice happens under one lock for all homes of this user, and what a home holds is written down beside that lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentinker.compose.local.errors import PortTaken

__all__ = ["PortRequest", "choose_ports", "is_port_free", "reserve_ports"]

# Above the registered services and below Linux' ephemeral range (32768), so that no client's outgoing connection takes one of ours.
_FIRST, _LAST = 20_000, 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRequest:
    """One port, or `width` ports in a row of which the first is named.

    `also`: the program takes this port plus that number, too, and cannot be told otherwise.
    """

    name: str
    usual: int = 0  # 0: none, any free one
    width: int = 1
    also: int = 0

    def numbers(self, port: int) -> list[int]:
        """Every port that this one stands for."""
        return [*range(port, port + self.width), *([port + self.also] if self.also else [])]


def choose_ports(
    requests: Sequence[PortRequest],
    *,
    asked: Mapping[str, int],
    kept: Mapping[str, int],
    taken: frozenset[int],
    is_free: Callable[[int], bool],
    start: int = _FIRST,
    settings: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """A port for every request. Raises PortTaken for an asked-for port that somebody else uses or that two requests ask for.

    `settings`: what asked for a port, where it was not `--port`.
    """
    used = set(taken)
    chosen: dict[str, int] = {}

    def fits(request: PortRequest, port: int) -> bool:
        return all(number not in used and is_free(number) for number in request.numbers(port))

    def take(request: PortRequest, port: int) -> None:
        chosen[request.name] = port
        used.update(request.numbers(port))

    for request in requests:  # asked-for ones first: nothing else may sit on them
        if request.name in asked:
            if not fits(request, asked[request.name]):
                setting = (settings or {}).get(request.name, f"--port {request.name}=NUMBER")
                raise PortTaken(f"port {asked[request.name]} for {request.name} is in use; free it or choose another with {setting}")
            take(request, asked[request.name])
    for request in requests:
        if request.name not in chosen and request.name in kept and fits(request, kept[request.name]):
            take(request, kept[request.name])
    for request in requests:
        if request.name in chosen:
            continue
        candidates = ([request.usual] if request.usual else []) + _candidates(request, start)
        port = next((candidate for candidate in candidates if fits(request, candidate)), None)
        if port is None:
            raise PortTaken(f"no {request.width} free ports in a row between {_FIRST} and {_LAST} for {request.name}")
        take(request, port)
    return chosen


def _candidates(request: PortRequest, start: int) -> list[int]:
    """Every port of our range once, from `start` on, wrapping around; lower by `also`, so that the companion lies in the range."""
    return [_FIRST - request.also + (start - _FIRST + i) % (_LAST - _FIRST) for i in range(_LAST - _FIRST)]


def is_port_free(port: int) -> bool:
    """Whether nobody listens on 127.0.0.1 or on all addresses. SO_REUSEADDR looks past connections that are only closing."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def reserve_ports(
    requests: Sequence[PortRequest],
    *,
    home: Path,
    asked: Mapping[str, int],
    kept: Mapping[str, int],
    ours: frozenset[int],
    register: Path,
    settings: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """`choose_ports` against this machine. `ours`: ports that this home's own running programs hold, which are not in the way."""
    with _register(register) as homes:
        taken = frozenset(port for other, ports in homes.items() if other != str(home) for port in ports)
        chosen = choose_ports(
            requests,
            asked=asked,
            kept=kept,
            taken=taken,
            is_free=lambda port: port in ours or is_port_free(port),
            start=_FIRST + zlib.crc32(str(home).encode()) % (_LAST - _FIRST),
            settings=settings,
        )
        homes[str(home)] = sorted(number for request in requests for number in request.numbers(chosen[request.name]))
        return chosen


@contextlib.contextmanager
def _register(path: Path) -> Iterator[dict[str, list[int]]]:
    """The ports that homes of this user hold, locked. Homes that are gone are dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            homes = {str(home): [int(port) for port in ports] for home, ports in json.load(file).items() if Path(home).is_dir()}
        except (ValueError, AttributeError, TypeError):
            homes = {}
        yield homes
        file.seek(0)
        file.truncate()
        json.dump(homes, file)
