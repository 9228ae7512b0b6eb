"""Where the gateway is and which key to show: arguments, then environment, then what `opentinker up` wrote."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from opentinker.schemas.errors import shorten

from .errors import ConfigurationError

__all__ = ["Connection", "find_connection"]

_ADDRESS = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[!-~]*)?")


@dataclass(frozen=True, slots=True)
class Connection:
    url: str
    api_key: str


def find_connection(url: str | None = None, api_key: str | None = None) -> Connection:
    """Raises ConfigurationError naming what to set."""
    home = Path(os.environ.get("OPENTINKER_HOME") or Path.home() / ".opentinker").expanduser()
    gateway: dict[str, object] = {}
    config = home / "config.toml"
    if config.exists():
        try:
            section = tomllib.loads(config.read_text()).get("gateway", {})
            gateway = section if isinstance(section, dict) else {}
        except (OSError, ValueError) as error:  # ValueError: no TOML, no UTF-8
            raise ConfigurationError(f"{config} cannot be read: {error}; mend it, or run opentinker up again") from None
    found_url = url or os.environ.get("OPENTINKER_GATEWAY__URL") or str(gateway.get("url") or "http://127.0.0.1:8080")
    key = api_key or os.environ.get("OPENTINKER_API_KEY")
    if key is None:
        file = Path(os.environ.get("OPENTINKER_GATEWAY__API_KEY_FILE") or str(gateway.get("api_key_file") or home / "secrets" / "api-key"))
        try:
            key = file.read_text(errors="replace").strip()
        except OSError:
            raise ConfigurationError(f"no API key: set OPENTINKER_API_KEY, or start the local stack, which writes {file}") from None
    if not key:
        raise ConfigurationError("the API key is empty; set OPENTINKER_API_KEY to one, or unset it to use the local stack's")
    if not key.isascii() or not key.isprintable():  # it becomes a header; it is never shown
        raise ConfigurationError(
            "the API key is not a line of printable ASCII; copy it anew into OPENTINKER_API_KEY, or unset that to use the local stack's"
        )
    if not _ADDRESS.fullmatch(found_url) or not _port_is_one(found_url):
        raise ConfigurationError(f"{shorten(found_url)} is not the address of a gateway; set OPENTINKER_GATEWAY__URL to http://HOST:PORT")
    return Connection(found_url.rstrip("/"), key)


def _port_is_one(url: str) -> bool:
    try:
        port = urlsplit(url).port
    except ValueError:  # above 65535
        return False
    return port is None or port > 0
