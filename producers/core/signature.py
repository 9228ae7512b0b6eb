"""Signed requests: an API key proves who publishes, without travelling.

`ot-key-id` names the key, `ot-signature` is the hex HMAC-SHA256, made with the key, over `ce_id NUL ce_source NUL value`. The id is covered, so a copy of a
signed record is the same job again, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from opentinker.schemas.errors import FieldError

__all__ = ["BOOTSTRAP_KEY_ID", "KEY_ID_HEADER", "SIGNATURE_HEADER", "check_signature", "sign"]

KEY_ID_HEADER = "ot-key-id"
SIGNATURE_HEADER = "ot-signature"
BOOTSTRAP_KEY_ID = "bootstrap"  # the key that `opentinker up` makes


def sign(key: str, ce_id: str, ce_source: str, value: bytes) -> str:
    """The signature of one record, as 64 hex digits."""
    message = ce_id.encode() + b"\x00" + ce_source.encode() + b"\x00" + value
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


def check_signature(keys: Mapping[str, str], key_id: str, signature: str, ce_id: str, ce_source: str, value: bytes) -> FieldError | None:
    """What is wrong with a signature, or None. Takes the same time whatever is wrong with the digits."""
    key = keys.get(key_id)
    if key is None:
        return FieldError(field=f"header {KEY_ID_HEADER}", message=f"no key has the id {key_id[:40]!r}", remedy="name a key that exists")
    expected = sign(key, ce_id, ce_source, value)
    if not hmac.compare_digest(signature.encode(errors="replace"), expected.encode()):
        remedy = "sign ce_id NUL ce_source NUL value with HMAC-SHA256 and send it as hex"
        return FieldError(field=f"header {SIGNATURE_HEADER}", message="does not match", remedy=remedy)
    return None
