"""What the registry refuses, and how it says so over HTTP. `reason` is for programs, the text for people.

RegistryError
├── Unauthorised       401  no token, or one that is not valid (any more)
├── NotFound           404  nothing of that name is visible
├── Fenced             409  a higher (attempt, lease epoch) has been opened: stop, and write nothing more
├── Conflict           409  the same id stands for something else already
├── Gone               410  the upload was collected; begin again under a new id
├── InvalidCheckpoint  422  names, sizes, members or contents are wrong; carries FieldErrors
└── MigrationError     –    the database's history is not ours; the service does not start
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from opentinker.schemas.errors import FieldError

__all__ = ["Conflict", "Fenced", "Gone", "InvalidCheckpoint", "MigrationError", "NotFound", "RegistryError", "Unauthorised"]


class RegistryError(Exception):
    """Root of the tree."""

    status: ClassVar[int] = 500
    errors: tuple[FieldError, ...] = ()

    @property
    def reason(self) -> str:
        """For programs, and part of the API: `fenced`, `conflict`, `gone`, …"""
        return type(self).__name__.lower()


class Unauthorised(RegistryError):
    """The caller has not shown a token that allows this."""

    status = 401


class NotFound(RegistryError):
    """No such thing, as far as this caller may know."""

    status = 404


class Fenced(RegistryError):
    """A later attempt or lease epoch owns the job. Final: no retry can succeed."""

    status = 409


class Conflict(RegistryError):
    """The id is taken by other contents."""

    status = 409


class Gone(RegistryError):
    """The upload is being collected, or was."""

    status = 410


class InvalidCheckpoint(RegistryError):
    """The checkpoint breaks a rule, or what lies in the store is not what was announced."""

    status = 422

    def __init__(self, errors: Sequence[FieldError]) -> None:
        assert errors
        self.errors = tuple(errors)
        super().__init__("; ".join(error.text() for error in self.errors[:3]))


class MigrationError(RegistryError):
    """An applied migration is not in this release, or was changed after it was applied."""
