"""What can go wrong for a caller of the API.

OpenTinkerError
├── ConfigurationError      it is not said, or not rightly, where the gateway is or which key to show
├── UnreachableError        no answer at all: wrong address, gateway down, network
├── UnavailableError        503 or 429: try again later; retries are used up
│   └── QueueFullError      429: the namespace has as many jobs waiting as it may; not tried again
├── AuthenticationError     401: no key, or a wrong one
├── ForbiddenError          403: the key may not do this
├── NotFoundError           404
├── ConflictError           409: a live job has that name, or the same key is in use
├── InvalidRequestError     400, 413, 415, 422: `errors` names each field and the remedy
├── ServerError             any other answer of 500 and above
├── WaitTimeoutError        the job has not ended in the time given
└── JobFailedError          the job ended, but did not complete; `job` holds its last view
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentinker.schemas.errors import FieldError

if TYPE_CHECKING:
    from .views import JobView

__all__ = [
    "AuthenticationError",
    "ConfigurationError",
    "ConflictError",
    "ForbiddenError",
    "InvalidRequestError",
    "JobFailedError",
    "NotFoundError",
    "OpenTinkerError",
    "QueueFullError",
    "ServerError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UnreachableError",
    "WaitTimeoutError",
]


class OpenTinkerError(Exception):
    """Any failure of a call. `status` is the HTTP status, 0 where there was no answer."""

    def __init__(self, text: str, status: int = 0, errors: Sequence[FieldError] = ()) -> None:
        super().__init__(text)
        self.status, self.errors = status, tuple(errors)


class ConfigurationError(OpenTinkerError):
    """A setting is missing or wrong."""


class UnreachableError(OpenTinkerError):
    """No answer."""


class UnavailableError(OpenTinkerError):
    """Not now."""


class UnknownOutcomeError(UnavailableError):
    """It may have been accepted or not; sending the same again, with the same key, is safe and tells."""


class QueueFullError(UnavailableError):
    """Not before some of its jobs have started."""


class AuthenticationError(OpenTinkerError):
    """Who are you?"""


class ForbiddenError(OpenTinkerError):
    """Not with this key."""


class NotFoundError(OpenTinkerError):
    """There is no such thing, or it is not yours."""


class ConflictError(OpenTinkerError):
    """It contradicts what is."""


class InvalidRequestError(OpenTinkerError):
    """The request breaks a rule; `errors` says which."""


class ServerError(OpenTinkerError):
    """The service failed."""


class WaitTimeoutError(OpenTinkerError):
    """Still not over."""


class JobFailedError(OpenTinkerError):
    """The job failed or was cancelled."""

    def __init__(self, job: JobView) -> None:
        super().__init__(f"job {job.metadata.name} ended as {job.status.phase}: {job.status.message or job.status.reason}")
        self.job = job
