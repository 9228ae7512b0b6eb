"""Field types shared by messages. Bounds are generous, and there so that a hostile message cannot fill memory.

Every whole number has bounds (a test walks them all): what has none can be larger than the journal, PostgreSQL and JavaScript can hold, and one such record
would stop its reader for ever.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

__all__ = ["Count", "Digest", "JobUid", "Millis", "Name", "NodeName", "Ordinal", "Text", "Uid", "Whole"]

Uid = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:-]+$")]
JobUid = Annotated[str, Field(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")]
Name = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
NodeName = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
_TEXT_CHARACTERS_MAX = 4096


def _mended(value: object) -> object:
    """What people and their programs wrote, as every reader can hold it. To refuse the message for it would lose the rest of it; and a message of ours that
    quotes another's text must never fail for its length."""
    if not isinstance(value, str):
        return value
    text = value.replace("\0", "\ufffd")  # PostgreSQL stores no U+0000
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[: _TEXT_CHARACTERS_MAX - 1] + "…"


Text = Annotated[str, BeforeValidator(_mended), Field(max_length=_TEXT_CHARACTERS_MAX)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Ordinal = Annotated[int, Field(ge=1, lt=2**53)]
Whole = Annotated[int, Field(gt=-(2**53), lt=2**53)]
Millis = Annotated[int, Field(ge=0, lt=2**53)]
