"""The table of rights and the table of topics say the same, and nobody may more than its part needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentinker.schemas.access import SERVICE_ROLES, Operation, Quota, Resource, Right, Role, grants, is_ours, roles, tenant_role
from opentinker.schemas.topics import (
    ADMIN,
    EVENTS,
    JOURNAL,
    PLACEMENTS,
    REPLIES,
    REQUESTS,
    STATUS,
    TOPICS,
    Topic,
    dead_letter_topic,
    namespace_of_topic,
    tenant_replies,
    tenant_requests,
    topic_named,
    topic_table,
)

# What `written_by` and `read_by` call a role.
WORDS = {
    "gateway": "gateway", "operator": "operator", "ingress": "ingress", "scheduler": "scheduler", "one writer a partition": "scheduler",
    "its read replica": "replica", "agents": "agent", "registry": "registry", "administrators": "administrator", "other systems": "publisher",
    "whoever asked": "publisher", "anyone": "reader",
}  # fmt: skip


def said(text: str) -> set[str]:
    """`scheduler (transactional), ingress` as roles."""
    return {WORDS[part.partition("(")[0].strip()] for part in text.split(",")}


def may(operation: Operation, topic: str) -> set[str]:
    """Roles whose rights name the topic. Administrators read by a prefix, which is judged apart."""
    return {role.name for role in SERVICE_ROLES if topic in role.topics(operation)}


@pytest.mark.parametrize("topic", TOPICS.values(), ids=lambda topic: topic.name)
def test_a_topic_is_written_by_whom_its_table_names_and_nobody_else(topic: Topic) -> None:
    assert may(Operation.WRITE, topic.name) == said(topic.written_by)


@pytest.mark.parametrize("topic", TOPICS.values(), ids=lambda topic: topic.name)
def test_a_topic_is_read_by_whom_its_table_names(topic: Topic) -> None:
    allowed, named = may(Operation.READ, topic.name), said(topic.read_by)
    assert named <= allowed
    assert "anyone" in topic.read_by or allowed == named


@pytest.mark.parametrize("topic", [topic for topic in TOPICS.values() if topic.dead_letters], ids=lambda topic: topic.name)
def test_dead_letters_are_written_by_readers_of_the_topic_alone(topic: Topic) -> None:
    writers = may(Operation.WRITE, dead_letter_topic(topic.name))
    assert writers
    assert writers <= may(Operation.READ, topic.name)


def test_every_topic_that_is_named_exists() -> None:
    existing = topic_table(4, ["team-a"])
    assert {
        right.name for role in roles(["team-a"]) for right in role.rights if right.resource is Resource.TOPIC and not right.prefixed
    } <= existing.keys()


@pytest.mark.parametrize("topic", [JOURNAL, PLACEMENTS, STATUS, EVENTS])
def test_what_the_scheduler_decides_nobody_else_writes(topic: str) -> None:
    everyone = roles(["team-a", "team-b"])
    assert {role.name for role in everyone if topic in role.topics(Operation.WRITE)} == {"scheduler"}
    changing = {Operation.WRITE, Operation.DELETE}
    assert not [
        right for role in everyone for right in role.rights if right.prefixed and right.resource is Resource.TOPIC and right.operation in changing
    ]


def test_only_administrators_make_topics_or_drop_dead_letters_and_only_the_scheduler_trims_its_journal() -> None:
    rights = [(role.name, right) for role in roles(["team-a"]) for right in role.rights]
    assert {name for name, right in rights if right.operation is Operation.CREATE} == {"administrator"}
    deleting = {(name, right.name) for name, right in rights if right.operation is Operation.DELETE and not right.name.endswith(".dlq")}
    assert deleting == {("scheduler", JOURNAL)}
    assert {name for name, right in rights if right.operation is Operation.DELETE and right.name.endswith(".dlq")} == {"administrator"}
    assert {name for name, right in rights if right.resource is Resource.TRANSACTIONAL_ID} == {"scheduler"}


def test_a_tenant_writes_its_requests_and_reads_its_replies_and_nothing_else() -> None:
    tenant = tenant_role("team-a")
    assert set(tenant.rights) == {
        Right(Resource.TOPIC, "opentinker.jobs.requests.team-a.v1", Operation.WRITE),
        Right(Resource.TOPIC, "opentinker.jobs.replies.team-a.v1", Operation.READ),
        Right(Resource.GROUP, "opentinker-tenant-team-a.", Operation.READ, prefixed=True),
    }
    assert not {grant.right for grant in grants([tenant])} & {grant.right for grant in grants([tenant_role("team-a-b")])}


def test_the_ingress_serves_the_namespaces_that_there_are() -> None:
    [ingress] = [role for role in roles(["team-a"]) if role.name == "ingress"]
    assert {REQUESTS, tenant_requests("team-a")} <= ingress.topics(Operation.READ)
    assert {REPLIES, tenant_replies("team-a"), dead_letter_topic(tenant_requests("team-a"))} <= ingress.topics(Operation.WRITE)
    [alone] = [role for role in roles() if role.name == "ingress"]
    assert tenant_requests("team-a") not in alone.topics(Operation.READ)


def test_quotas_are_chosen_by_role() -> None:
    chosen = {role.name: role.quota for role in roles(["team-a"], {"tenant": Quota(producer_bytes_per_s=5), "reader": Quota(producer_bytes_per_s=7)})}
    assert chosen["tenant-team-a"] == Quota(producer_bytes_per_s=5)
    assert chosen["reader"] == Quota(producer_bytes_per_s=7)
    assert chosen["agent"] == Quota(producer_bytes_per_s=20 * 2**20, per_client=True)
    assert chosen["scheduler"] is None


@pytest.mark.parametrize(
    ("entry", "ours"),
    [
        (("opentinker-gateway", "topic", "elsewhere", False), True),
        (("bob", "topic", JOURNAL, False), True),
        (("bob", "topic", "*", False), True),
        (("bob", "topic", "open", True), True),
        (("*", "topic", "", True), True),
        (("bob", "transactional-id", "status-1", False), True),
        (("bob", "group", SERVICE_ROLES[0].principal, False), True),
        (("bob", "topic", "orders", False), False),
        (("bob", "topic", "open", False), False),
        (("bob", "cluster", "kafka-cluster", False), False),
    ],
)
def test_an_entry_concerns_us_if_it_is_of_our_users_or_reaches_our_resources(entry: tuple[str, str, str, bool], ours: bool) -> None:
    assert is_ours(*entry) is ours


def test_a_namespaces_topics_are_known_by_name() -> None:
    assert namespace_of_topic(tenant_requests("team-a")) == "team-a"
    assert namespace_of_topic(REQUESTS) is None
    assert namespace_of_topic(ADMIN) is None
    assert namespace_of_topic("opentinker.jobs.requests.Team.v1") is None
    assert topic_named(tenant_requests("team-a")).messages == TOPICS[REQUESTS].messages
    with pytest.raises(KeyError):
        topic_named("opentinker.jobs.requests.a.b.v1")


def test_the_documented_table_is_this_one() -> None:
    """docs/security.md says of every user what it may do, right by right."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    rows = page.partition("<!-- roles:")[2].partition("<!-- end of roles -->")[0].splitlines()
    documented = {cells[1].strip("` "): cells[3].strip() for cells in (row.split("|") for row in rows) if len(cells) == 5}
    expected = {role.principal: _in_words(role) for role in (*SERVICE_ROLES, tenant_role("NAMESPACE"))}
    assert {user: text for user, text in documented.items() if user.startswith("opentinker-")} == expected


def _in_words(role: Role) -> str:
    may: dict[tuple[str, str], list[str]] = {}
    for right in sorted(role.rights):
        may.setdefault((right.operation.value, right.resource.value), []).append(f"`{right.name}{'…' if right.prefixed else ''}`")
    return "; ".join(f"{operation} {resource} {', '.join(names)}" for (operation, resource), names in sorted(may.items()))
