"""Migrations: numbered `.sql` files, applied once each, in order, in one transaction each, by one process at a time.

A file that was applied must stay as it was: its SHA-256 is remembered and compared at every start.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import structlog

from .errors import MigrationError

__all__ = ["Migration", "migrate", "read_migrations"]

_PACKAGE = "opentinker.registry.migrations"
_LOCK = 0x6F70656E_0001  # of pg_advisory_lock; the services of one database share it
_LOCK_WAIT_S = 120.0  # another process may be migrating
_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Migration:
    number: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def read_migrations() -> list[Migration]:
    """The files of this release, by number from 1 without a gap."""
    entries = [(match, entry) for entry in resources.files(_PACKAGE).iterdir() if (match := _NAME.fullmatch(entry.name))]
    found = [Migration(number=int(match[1]), name=entry.name, sql=entry.read_text(encoding="utf-8")) for match, entry in entries]
    found.sort()
    assert [migration.number for migration in found] == list(range(1, len(found) + 1)), "migrations are numbered 1..n"
    return found


async def migrate(connection: Any, migrations: list[Migration] | None = None) -> list[str]:
    """Bring the database to this release; returns the names applied now. Raises MigrationError if its history is not ours."""
    wanted = read_migrations() if migrations is None else migrations
    await connection.execute("SELECT pg_advisory_lock($1)", _LOCK, timeout=_LOCK_WAIT_S)
    try:
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_migrations "
            "(number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        applied = {row["number"]: row for row in await connection.fetch("SELECT number, name, checksum FROM schema_migrations")}
        _compare(wanted, applied)
        done = []
        for migration in wanted:
            if migration.number in applied:
                continue
            async with connection.transaction():
                await connection.execute(migration.sql)
                await connection.execute(
                    "INSERT INTO schema_migrations (number, name, checksum) VALUES ($1, $2, $3)", migration.number, migration.name, migration.checksum
                )
            structlog.get_logger().info("migration applied", migration=migration.name)
            done.append(migration.name)
        return done
    finally:
        await connection.execute("SELECT pg_advisory_unlock($1)", _LOCK)


def _compare(wanted: list[Migration], applied: dict[int, Any]) -> None:
    known = {migration.number: migration for migration in wanted}
    for number, row in sorted(applied.items()):
        if number not in known:
            raise MigrationError(f"the database has migration {row['name']}, which this release does not know; run the newer release")
        if row["checksum"] != known[number].checksum:
            raise MigrationError(f"migration {row['name']} was changed after it was applied; restore the file and add a new migration instead")
