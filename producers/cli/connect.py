"""The gateway as commands speak to it: a person waits for the answer, so each wait is short, and one that is not says why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ..client import Client
from ..client.naming import looks_like_uid

if TYPE_CHECKING:
    from opentinker.compose.runtime.settings import Settings

__all__ = ["configured", "gateway", "uid_of"]

_TIMEOUT_S = 10.0  # longer than the gateway itself waits for a neighbour or for Kafka
_ATTEMPTS = 2


def gateway() -> Client:
    """A client for one command. Raises OpenTinkerError naming what to set."""
    return Client(timeout_s=_TIMEOUT_S, attempts=_ATTEMPTS, on_wait=lambda text: click.echo(f"opentinker: {text}", err=True))


def configured() -> Settings:
    """Settings for a command that speaks to Kafka. Raises SettingsError where nobody has said which: it would guess, and write to whatever answers."""
    from opentinker.compose.runtime.settings import SettingsError, home_directory, load_settings

    settings = load_settings()
    if "bootstrap_servers" not in settings.kafka.model_fields_set:
        raise SettingsError(
            f"no Kafka is configured: `opentinker up` starts a local one and writes {home_directory(dict(os.environ)) / 'config.toml'};"
            " OPENTINKER_KAFKA__BOOTSTRAP_SERVERS names another"
        )
    return settings


def uid_of(job: str, namespace: str) -> str:
    """The uid of a job that is given by uid, which asks nobody, or by name or the beginning of a uid, which asks the gateway."""
    if looks_like_uid(job):
        return job
    with gateway() as client:
        return client.job(job, namespace).metadata.uid
