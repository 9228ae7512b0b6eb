"""Who may do what, on a real broker with an authorizer: the table is applied, it suffices for all of ours, and nobody else gets anywhere."""

from __future__ import annotations

import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentinker.compose.runtime import access, kafka
from opentinker.compose.runtime.quotas import describe_quotas
from opentinker.compose.runtime.settings import KafkaSettings, SettingsError
from opentinker.schemas.access import Quota, grants, principal, roles
from secure_kafka import SecureBroker, secure_broker

pytestmark = [pytest.mark.stack, pytest.mark.slow]

NAMESPACES = ("team-a", "team-b")
ROLES = roles(NAMESPACES)


class Access:
    """The broker, its topics, and the table applied to it."""

    def __init__(self, broker: SecureBroker, passwords: dict[str, str]) -> None:
        self.broker, self._passwords = broker, passwords

    def of(self, role: str) -> KafkaSettings:
        """Settings of a client that logs in as this role."""
        return self.broker.settings(principal(role), self._passwords[principal(role)])

    def environment(self, role: str, home: Path, **more: str) -> dict[str, str]:
        return self.broker.environment(home, principal(role), self._passwords[principal(role)], **more)


@pytest.fixture(scope="module")
async def granted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Access]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("access-control")
    with secure_broker(directory) as broker:
        await kafka.wait_for_broker(lambda: kafka.ensure_topics(broker.settings(), NAMESPACES), 30)
        passwords = access.passwords(directory / "passwords", [role.principal for role in ROLES])
        await access.apply(broker.settings(), ROLES, passwords)
        yield Access(broker, passwords)


async def test_what_was_applied_stands_and_applying_again_changes_nothing(granted: Access, tmp_path: Path) -> None:
    admin = granted.broker.settings()
    standing = await access.read_standing(admin)
    assert standing.users == {role.principal for role in ROLES}
    assert standing.entries == access.entries(grants(ROLES))
    again = await access.apply(admin, ROLES, granted._passwords)
    assert again == access.Difference()


async def test_what_is_missing_and_what_is_beyond_is_told_and_mended(granted: Access) -> None:
    """By a table without tenants the tenants are beyond; by one with a new tenant it is missing."""
    admin = granted.broker.settings()
    wider = roles((*NAMESPACES, "team-c"))
    found = access.compare(wider, await access.read_standing(admin))
    assert found.users == ("opentinker-tenant-team-c",)
    assert any("opentinker-tenant-team-c may Write topic opentinker.jobs.requests.team-c.v1" in line for line in found.missing())
    assert not found.beyond()
    await access.apply(admin, wider, {"opentinker-tenant-team-c": "a password of team c"})
    assert not access.compare(wider, await access.read_standing(admin)).missing()
    beyond = access.compare(ROLES, await access.read_standing(admin)).beyond()
    assert {line.split()[0] for line in beyond} == {"user", "opentinker-tenant-team-c", "opentinker-ingress", "quota"}
    await access.apply(admin, ROLES, {}, prune=True)
    assert access.compare(ROLES, await access.read_standing(admin)) == access.Difference()


async def test_an_entry_of_somebody_else_that_reaches_our_topics_is_told(granted: Access) -> None:
    admin = granted.broker.settings()
    entry = access.Entry(user="bob", operation="All", resource="topic", name="*", host="10.0.0.1")
    client = access._client(admin)
    for answer in client.create_acls([access._binding(entry)]).values():
        answer.result(10)
    found = access.compare(ROLES, await access.read_standing(admin))
    assert found.entries_beyond == (entry,)
    assert found.beyond() == ["bob may All topic * from 10.0.0.1"]
    await access.apply(admin, ROLES, {}, prune=True)
    assert not access.compare(ROLES, await access.read_standing(admin)).beyond()


async def test_quotas_stand_as_the_table_says(granted: Access) -> None:
    admin = kafka.admin_client(granted.broker.settings(), "test-quotas")
    await admin.start()
    try:
        assert await describe_quotas(admin) == {
            ("opentinker-agent", True): {"producer_byte_rate": 20 * 2**20},
            ("opentinker-tenant-team-a", False): {"producer_byte_rate": 2**20, "request_percentage": 50},
            ("opentinker-tenant-team-b", False): {"producer_byte_rate": 2**20, "request_percentage": 50},
        }
        changed = roles(NAMESPACES, {"tenant": Quota(producer_bytes_per_s=5_000)})
        await access.apply(granted.broker.settings(), changed, {})
        assert (await describe_quotas(admin))["opentinker-tenant-team-a", False] == {"producer_byte_rate": 5_000}
        await access.apply(granted.broker.settings(), ROLES, {})
        assert (await describe_quotas(admin))["opentinker-tenant-team-a", False] == {"producer_byte_rate": 2**20, "request_percentage": 50}
    finally:
        await admin.close()


async def test_who_is_no_super_user_may_not_look(granted: Access) -> None:
    with pytest.raises(access.AccessError, match="log in as a super user"):
        await access.read_standing(granted.of("administrator"))


def test_passwords_are_made_once_private_and_never_weak(tmp_path: Path) -> None:
    made = access.passwords(tmp_path / "p", ["opentinker-agent", "opentinker-gateway"])
    assert access.passwords(tmp_path / "p", ["opentinker-agent"]) == {"opentinker-agent": made["opentinker-agent"]}
    assert len(set(made.values())) == 2
    assert all(len(password) >= 40 for password in made.values())
    path = tmp_path / "p" / "opentinker-agent"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="others can read it"):
        access.passwords(tmp_path / "p", ["opentinker-agent"])
