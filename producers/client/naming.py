"""What may stand where a job or a model is named: judged before a request, since an address with anything else in it means another place."""

from __future__ import annotations

import re

from opentinker.schemas.errors import FieldError, shorten

from .errors import InvalidRequestError

__all__ = ["check_job", "check_name", "looks_like_uid", "may_begin_uid"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BEGINNING = re.compile(r"[0-9a-f]{8}[-0-9a-f]{0,28}")  # as much of one as lists and logs show, up to all of it
_FORM = "1 to 63 of a-z, 0-9 and '-', starting and ending with a letter or digit"


def looks_like_uid(job: str) -> bool:
    return _UID.fullmatch(job) is not None


def may_begin_uid(job: str) -> bool:
    return _BEGINNING.fullmatch(job) is not None


def check_job(job: str) -> str:
    """The same name or uid. Raises InvalidRequestError."""
    return check_name("job", job, f"is neither a name ({_FORM}) nor a uid")


def check_name(field: str, name: str, wrong: str = f"is not a name ({_FORM})") -> str:
    """The same name. Raises InvalidRequestError."""
    if _NAME.fullmatch(name):  # a uid has the form of a name, too
        return name
    remedy = {"job": "see opentinker get jobs", "namespace": "leave it out for the namespace default"}.get(field, "correct it")
    error = FieldError(field=field, message=f"{shorten(name)} {wrong}", remedy=remedy)
    raise InvalidRequestError(error.text(), errors=[error])
