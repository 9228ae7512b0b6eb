"""Secrets that live in files: readable by their owner alone, or the service does not start."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from .settings import SettingsError

__all__ = ["read_secret", "same_secret"]

_CHARACTERS_MIN = 16


def read_secret(path: Path, purpose: str) -> str:
    """The file's one line. Raises SettingsError if it is missing, too short, or readable by group or others."""
    try:
        mode = path.stat().st_mode & 0o777
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise SettingsError(f"cannot read the {purpose} from {path}: {reason}; make the file with mode 0600") from None
    if mode & 0o077:
        raise SettingsError(f"{path} holds the {purpose} and has mode {mode:04o}: others can read it; run chmod 600 {path}, and replace the secret")
    if len(text) < _CHARACTERS_MIN or not text.isascii() or not text.isprintable():
        raise SettingsError(f"{path} holds no usable {purpose}; put at least {_CHARACTERS_MIN} printable ASCII characters in it")
    return text


def same_secret(given: str, expected: str) -> bool:
    """Compare without telling, by the time it takes, how much was right."""
    return hmac.compare_digest(hashlib.sha256(given.encode(errors="replace")).digest(), hashlib.sha256(expected.encode()).digest())
