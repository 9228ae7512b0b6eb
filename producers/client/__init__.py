"""The Python client: `Client` and its asynchronous twin `AsyncClient`, typed views, typed errors, retries where they are safe."""

from __future__ import annotations

from .aio import AsyncClient
from .errors import (
    AuthenticationError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    JobFailedError,
    NotFoundError,
    OpenTinkerError,
    ServerError,
    UnavailableError,
    UnreachableError,
    WaitTimeoutError,
)
from .sync import Client
from .views import JobStatusView, JobView, MetadataView, ModelView, ProgressView

__all__ = [
    "AsyncClient",
    "AuthenticationError",
    "Client",
    "ConflictError",
    "ForbiddenError",
    "InvalidRequestError",
    "JobFailedError",
    "JobStatusView",
    "JobView",
    "MetadataView",
    "ModelView",
    "NotFoundError",
    "OpenTinkerError",
    "ProgressView",
    "ServerError",
    "UnavailableError",
    "UnreachableError",
    "WaitTimeoutError",
]
