"""The outside world's way in: client SDK, CLI, gateway, ingress and page.

`from opentinker.producers import Client, AsyncClient`. Imports are lazy, so that `opentinker --help` and a light install stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncClient, Client, JobView, OpenTinkerError

__all__ = ["AsyncClient", "Client", "JobView", "OpenTinkerError"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
