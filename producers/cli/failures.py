"""Which exit code an expected failure has. What is not here is a defect of ours and shows its traceback."""

from __future__ import annotations

from opentinker.schemas.errors import InvalidMessage

from ..client import errors

__all__ = ["exit_code_of", "sentence_of"]

_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.JobFailedError, 10),
    (errors.WaitTimeoutError, 6),
    (errors.NotFoundError, 3),
    (errors.AuthenticationError, 4),
    (errors.ForbiddenError, 4),
    (errors.ConflictError, 5),
    (errors.InvalidRequestError, 2),
    (errors.ConfigurationError, 2),
    (errors.OpenTinkerError, 1),
    (InvalidMessage, 2),
)


def exit_code_of(error: Exception) -> int | None:
    """None: not an expected failure."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if type(error).__module__.startswith("aiokafka"):
        return 1
    if isinstance(error, OSError):  # a full disk, a folder that may not be written
        return 1
    name = type(error).__name__
    if name == "SettingsError":
        return 2
    return 1 if name == "TopicMismatchError" else None


def sentence_of(error: Exception) -> str:
    """What is said of an expected failure."""
    if type(error).__name__ == "KafkaConnectionError":
        return f"Kafka does not answer ({error}); `opentinker up` starts a local one, OPENTINKER_KAFKA__BOOTSTRAP_SERVERS names another"
    return str(error)
