"""Who may do what, on a real broker with an authorizer: the table is applied and compared, and whatever it does not allow is refused and on record."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from opentinker.compose.runtime import access, kafka
from opentinker.compose.runtime.quotas import describe_quotas
from opentinker.compose.runtime.settings import KafkaSettings, SettingsError
from opentinker.producers.cli.access import kafka_commands
from opentinker.scheduler_stream.log import KafkaLog
from opentinker.schemas.access import INGRESS_GROUP, STATUS_TRANSACTIONS, Operation, Quota, Resource, Right, Role, grants, roles, tenant_role
from opentinker.schemas.topics import JOURNAL, PLACEMENTS, REQUESTS, topic_table
from secure_access import Access, granted_access, read_one, write_one

pytestmark = [pytest.mark.stack, pytest.mark.slow]

NAMESPACES = ("team-a", "team-b")
ROLES = roles(NAMESPACES)


@pytest.fixture(scope="module")
async def granted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Access]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    async with granted_access(tmp_path_factory.mktemp("access-control"), NAMESPACES) as made:
        yield made


async def test_what_was_applied_stands_and_applying_again_changes_nothing(granted: Access, tmp_path: Path) -> None:
    admin = granted.broker.settings()
    standing = await access.read_standing(admin)
    assert standing.users == {role.principal for role in ROLES}
    assert standing.entries == access.entries(grants(ROLES))
    again = await access.apply(admin, ROLES, granted.passwords)
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
    assert {line.split()[0] for line in beyond} == {"user", "opentinker-tenant-team-c", "opentinker-ingress", "opentinker-administrator", "quota"}
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


async def test_the_command_applies_and_compares_and_shows_no_password(granted: Access, tmp_path: Path) -> None:
    environment = granted.broker.environment(tmp_path, OPENTINKER_INGRESS__NAMESPACES=json.dumps(NAMESPACES))

    async def opentinker(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", "from opentinker.producers.cli import main; main()", "access", *arguments]
        return await asyncio.to_thread(subprocess.run, line, env=environment, capture_output=True, text=True, timeout=60, check=False)

    as_it_is = await opentinker("check")
    assert (as_it_is.returncode, as_it_is.stderr) == (0, ""), as_it_is
    lacking = await opentinker("check", "--namespace", "team-a", "--namespace", "team-d")
    assert lacking.returncode == 1
    assert "missing  user opentinker-tenant-team-d" in lacking.stdout
    assert "beyond   user opentinker-tenant-team-b" in lacking.stdout
    assert "opentinker access apply adds what is missing" in lacking.stderr
    made = await opentinker("apply", "--passwords", str(tmp_path / "p"), "--namespace", "team-d")
    assert made.returncode == 0, made
    passwords = {path.name: path.read_text().strip() for path in (tmp_path / "p").iterdir()}
    assert len(passwords) == len(ROLES) - 1  # one tenant in place of two
    assert not [password for password in passwords.values() if password in made.stdout + made.stderr]
    assert await may_log_in(granted, "opentinker-tenant-team-d", passwords["opentinker-tenant-team-d"])
    await access.apply(granted.broker.settings(), ROLES, granted.passwords, prune=True)


async def test_the_commands_for_kafkas_own_tools_do_the_same(granted: Access, tmp_path: Path) -> None:
    role = tenant_role("team-e")
    passwords = access.passwords(tmp_path / "passwords", [role.principal])
    (tmp_path / "tools").mkdir()
    environment = granted.broker.kafka_tools(tmp_path / "tools")
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(kafka_commands([role], tmp_path / "passwords"))]
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    found = access.compare(roles((*NAMESPACES, "team-e")), await access.read_standing(granted.broker.settings()))
    assert not [line for line in found.missing() if role.principal in line]
    assert await may_log_in(granted, role.principal, passwords[role.principal])
    await access.apply(granted.broker.settings(), ROLES, {}, prune=True)


async def may_log_in(granted: Access, user: str, password: str) -> bool:
    """Whoever is let in is refused a topic by name; a wrong password is no connection at all."""
    answers = [await read_one(granted.broker.settings(user, word), JOURNAL) for word in (password, "another password")]
    return isinstance(answers[0], TopicAuthorizationFailedError) and not isinstance(answers[1], TopicAuthorizationFailedError)


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


async def outcomes(granted: Access, role: Role) -> dict[tuple[str, str], KafkaError | None]:
    """What happens to each topic that this role tries to write and to read. A plain client: nothing of ours stands in its way."""
    found: dict[tuple[str, str], KafkaError | None] = {}
    options = kafka.client_options(granted.of(role.name))
    async with AIOKafkaProducer(**options, acks="all") as producer:
        for topic in topic_table(4, NAMESPACES):
            found["Write", topic] = await write_one(producer, topic)
    for topic in topic_table(4, NAMESPACES):
        found["Read", topic] = await read_one(granted.of(role.name), topic)
    return found


@pytest.fixture(scope="module")
async def filled(granted: Access) -> None:
    """A record on every topic, so that a read that is allowed gets something."""
    async with AIOKafkaProducer(**kafka.client_options(granted.broker.settings()), acks="all") as producer:
        for topic in topic_table(4, NAMESPACES):
            assert await write_one(producer, topic) is None


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
async def test_a_role_writes_and_reads_what_the_table_says_and_every_other_try_is_refused_and_on_record(
    granted: Access, filled: None, role: Role
) -> None:
    known = len(granted.broker.denials())
    seen = await outcomes(granted, role)
    reads_all = {topic for topic in topic_table(4, NAMESPACES) if role.name == "administrator"}
    allowed = {("Write", topic) for topic in role.topics(Operation.WRITE)} | {("Read", topic) for topic in role.topics(Operation.READ) | reads_all}
    assert {attempt for attempt, error in seen.items() if error is None} == allowed
    assert all(isinstance(error, TopicAuthorizationFailedError) for error in seen.values() if error is not None), seen
    recorded = {(denial.user, denial.operation, denial.resource) for denial in granted.broker.denials()[known:]}
    assert recorded == {(role.principal, *on_record(role, attempt, topic)) for attempt, topic in seen.keys() - allowed}


def on_record(role: Role, attempt: str, topic: str) -> tuple[str, str]:
    """(operation, resource) of a refusal: a client that may do nothing at all with a topic is stopped when it asks where the topic is."""
    known = any(
        right.resource is Resource.TOPIC and (topic.startswith(right.name) if right.prefixed else topic == right.name) for right in role.rights
    )
    return attempt.upper() if known else "DESCRIBE", f"Topic:LITERAL:{topic}"


Work = Callable[[KafkaSettings], Awaitable[Any]]


async def join_group(settings: KafkaSettings) -> None:
    reader = kafka.consumer(settings, "test", INGRESS_GROUP, REQUESTS)
    try:
        await reader.start()
        await reader.getmany(timeout_ms=5_000)
    finally:
        await reader.stop()


async def fence(settings: KafkaSettings) -> None:
    producer = kafka.transactional_producer(settings, "test", "status-0")
    try:
        await producer.start()
    finally:
        await producer.stop()


async def trim(settings: KafkaSettings) -> None:
    """Of a journal that has something to give up."""
    async with AIOKafkaProducer(**kafka.client_options(settings), acks="all") as producer:
        assert await write_one(producer, JOURNAL) is None
    log = KafkaLog(settings, 0, None)
    await log.trim((await log.bounds())[1], 2**52)


async def place_commands(settings: KafkaSettings) -> None:
    await kafka.end_offsets(settings, PLACEMENTS, [0])


@pytest.mark.parametrize(
    ("role", "right", "work"),
    [
        ("ingress", Right(Resource.GROUP, INGRESS_GROUP, Operation.READ), join_group),
        ("scheduler", Right(Resource.TRANSACTIONAL_ID, STATUS_TRANSACTIONS, Operation.WRITE, prefixed=True), fence),
        ("scheduler", Right(Resource.TOPIC, JOURNAL, Operation.DELETE), trim),
        ("agent", Right(Resource.TOPIC, PLACEMENTS, Operation.READ), place_commands),
        ("administrator", Right(Resource.TOPIC, "opentinker.", Operation.DESCRIBE_CONFIGS, prefixed=True), kafka.ensure_topics),
    ],
    ids=["group", "transactional id", "trim", "placements", "describe configs"],
)
async def test_each_of_these_rights_is_needed(granted: Access, filled: None, role: str, right: Right, work: Work) -> None:
    """With the table it works; without the one right it does not."""
    assert await refusal(work, granted.of(role)) is None
    less = tuple(replace(each, rights=tuple(r for r in each.rights if r != right)) if each.name == role else each for each in ROLES)
    await access.apply(granted.broker.settings(), less, {}, prune=True)
    try:
        assert await until(lambda: refusal(work, granted.of(role)), refused=True)
    finally:
        await access.apply(granted.broker.settings(), ROLES, {})
    assert await until(lambda: refusal(work, granted.of(role)), refused=False)


async def refusal(work: Work, settings: KafkaSettings) -> Exception | None:
    """What keeps some work from being done; None: it was done. aiokafka looks for the offsets of a topic that it may not see until it is stopped."""
    try:
        await asyncio.wait_for(work(settings), 15)
    except (KafkaError, TimeoutError) as error:
        return error
    return None


async def until(ask: Callable[[], Awaitable[Exception | None]], *, refused: bool) -> bool:
    """A change of rights reaches the broker a moment after the controller has taken it."""
    for _ in range(20):
        if (await ask() is not None) is refused:
            return True
        await asyncio.sleep(0.2)
    return False
