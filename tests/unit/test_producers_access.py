"""`opentinker access` without a Kafka: the plan, the commands for Kafka's own tools, and how a difference is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from opentinker.compose.runtime.access import Difference, Entry, Standing, compare, entries, quotas_of
from opentinker.producers.cli.access import access, kafka_commands, parse_quotas
from opentinker.schemas.access import Quota, grants, roles

ROLES = roles(["team-a"])
COMPLETE = Standing(users=frozenset(role.principal for role in ROLES), entries=entries(grants(ROLES)), quotas=quotas_of(ROLES))


def standing(**changes: object) -> Standing:
    return Standing(**({"users": COMPLETE.users, "entries": COMPLETE.entries, "quotas": COMPLETE.quotas} | changes))  # type: ignore[arg-type]


def test_nothing_differs_where_everything_stands() -> None:
    assert compare(ROLES, COMPLETE) == Difference()
    assert compare(ROLES, COMPLETE).missing() == compare(ROLES, COMPLETE).beyond() == []


def test_what_is_missing_and_what_is_beyond_is_said_in_words() -> None:
    gone = next(iter(sorted(COMPLETE.entries)))
    denied = Entry(user="opentinker-agent", operation="Write", resource="topic", name="opentinker.nodes.reports.v1", allowed=False)
    quotas = {("opentinker-tenant-team-a", False): {"producer_byte_rate": 7.0}, ("opentinker-reader", False): {"producer_byte_rate": 9.0}}
    found = compare(ROLES, standing(users=frozenset({"opentinker-old"}), entries=(COMPLETE.entries - {gone}) | {denied}, quotas=quotas))
    assert found.entries == (gone,)
    assert set(found.users) == set(COMPLETE.users)
    assert "quota of opentinker-tenant-team-a: producer_byte_rate=1048576, request_percentage=50" in found.missing()
    assert found.beyond() == [
        "user opentinker-old",
        "opentinker-agent must not Write topic opentinker.nodes.reports.v1",
        "quota of opentinker-reader: producer_byte_rate=9",
    ]


def test_the_plan_is_the_table() -> None:
    result = CliRunner().invoke(access, ["plan", "--namespace", "team-a", "--format", "json"])
    assert result.exit_code == 0, result.output
    planned = json.loads(result.output)
    found = {
        Entry(user=row["user"], operation=operation, resource=row["resource"], name=row["name"], prefixed=row["prefixed"])
        for row in planned["rights"]
        for operation in row["operations"]
    }
    assert found == COMPLETE.entries
    assert planned["quotas"]["opentinker-agent"] == {"producer_byte_rate": 20 * 2**20, "per_client": True}


def test_kafkas_own_tools_are_told_the_same() -> None:
    lines = kafka_commands(ROLES, Path("passwords"))
    found = set()
    for line in lines:
        if " --allow-principal " not in line:
            continue
        said = re.search(r"--allow-principal User:(\S+) (.*) --(topic|group|transactional-id) (\S+) --resource-pattern-type (\w+)", line)
        assert said, line
        for operation in re.findall(r"--operation (\w+)", said[2]):
            found.add(Entry(user=said[1], operation=operation, resource=said[3], name=said[4], prefixed=said[5] == "prefixed"))
    assert found == COMPLETE.entries
    users = [line for line in lines if "SCRAM-SHA-512" in line]
    assert len(users) == len(ROLES)
    assert all("password=$(cat passwords/opentinker-" in line for line in users)
    assert sum("producer_byte_rate" in line for line in lines) == 2


def test_quotas_are_read_by_role() -> None:
    assert parse_quotas(["tenant=2Mi:75", "agent=1Mi"]) == {
        "tenant": Quota(producer_bytes_per_s=2 * 2**20, request_percent=75),
        "agent": Quota(producer_bytes_per_s=2**20, per_client=True),
    }


@pytest.mark.parametrize("text", ["tennant=1Mi", "tenant", "tenant=", "tenant=fast", "tenant=1Mi:x", "tenant=1Mi:0"])
def test_a_quota_that_is_none_is_refused_in_words(text: str) -> None:
    with pytest.raises(click.UsageError, match="--quota"):
        parse_quotas([text])


def test_a_namespace_that_is_none_is_refused_in_words() -> None:
    result = CliRunner().invoke(access, ["plan", "--namespace", "Team A"])
    assert result.exit_code == 2
    assert "--namespace Team A" in result.output
