"""Field types shared by messages. Bounds are generous, and there so that a hostile message cannot fill memory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

__all__ = ["Count", "Digest", "JobUid", "Millis", "Name", "NodeName", "Text", "Uid"]

Uid = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:-]+$")]
JobUid = Annotated[str, Field(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")]
Name = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
NodeName = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Millis = Annotated[int, Field(ge=0, lt=2**53)]
