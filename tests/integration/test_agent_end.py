"""How a real agent ends, stands aside, and does not begin: what it tells the scheduler, so that no job pays for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from agent_world import AgentWorld, agent_world
from opentinker.schemas.messages.reports import AgentStarted, AttemptEnded, AttemptOutcome, AttemptPhase, FailureClass, Heartbeat

if TYPE_CHECKING:
    from own_stack import Stack

pytestmark = pytest.mark.slow
ENDLESS: dict[str, Any] = {"stop": {"totalSteps": 50_000_000}, "checkpoint": {"every": "1h"}}


@pytest_asyncio.fixture
async def world(stack: Stack, tmp_path: Path) -> AsyncIterator[AgentWorld]:
    async with agent_world(stack, tmp_path) as world:
        yield world


async def test_an_agent_that_is_told_to_end_says_so_first_makes_a_checkpoint_and_says_goodbye_last(world: AgentWorld) -> None:
    await world.start_agent()
    await world.start_attempt((0, 1), **ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    assert await world.stop_agent() == 0
    await world.until(lambda: bool(world.mine(Heartbeat)[-1:]) and world.mine(Heartbeat)[-1].attempts == (), 10)
    said = [message for message in world.seen if isinstance(message, Heartbeat | AttemptEnded) and message.node == world.node]
    first = next(place for place, message in enumerate(said) if isinstance(message, Heartbeat) and message.stopping)
    ended = next(place for place, message in enumerate(said) if isinstance(message, AttemptEnded))
    before, report, last = said[first], said[ended], said[-1]
    assert isinstance(before, Heartbeat)
    assert isinstance(report, AttemptEnded)
    assert isinstance(last, Heartbeat)
    assert first < ended
    assert before.attempts[0].phase is AttemptPhase.RUNNING, "the scheduler hears of it while the trainers still train"
    assert report.outcome is AttemptOutcome.STOPPED
    assert report.checkpoint_step == report.global_step > 0, "nothing is lost"
    assert (last.stopping, last.attempts) == (True, ())


async def test_an_agent_whose_name_is_anothers_ends_its_work_and_asks_again(world: AgentWorld) -> None:
    started = await world.start_agent()
    await world.start_attempt(**ENDLESS)
    await world.until_phase(AttemptPhase.RUNNING)
    await world.refuse()
    report = await world.until_ended()
    assert report.outcome is AttemptOutcome.STOPPED
    await world.until(lambda: len(world.mine(AgentStarted)) > 1, 10)
    assert world.mine(AgentStarted)[-1].incarnation == started.incarnation
    assert "another agent is this node" in world.agent_log()
    await world.until_phase(None)
    await world.start_attempt(number=2, stop={"totalSteps": 2_000})  # the other one is gone: it gets work again
    await world.until(lambda: len(world.mine(AttemptEnded)) > 1, 60)
    assert world.mine(AttemptEnded)[-1].outcome is AttemptOutcome.SUCCEEDED


async def test_a_restarted_agent_names_the_one_before_it(world: AgentWorld) -> None:
    first = await world.start_agent()
    await world.kill_agent()
    second = await world.start_agent()
    assert (first.previous_incarnation, second.previous_incarnation) == (None, first.incarnation)


async def test_a_registry_that_does_not_know_this_agent_gets_no_node(world: AgentWorld) -> None:
    world.registry.fault = lambda method, path: 401
    with pytest.raises(AssertionError, match="exited with 2") as error:
        await world.start_agent()
    assert "OPENTINKER_REGISTRY__URL" in str(error.value)
    assert world.mine(AgentStarted) == []


async def test_one_that_does_not_know_it_any_more_ends_the_agent_and_counts_against_no_job(world: AgentWorld) -> None:
    await world.start_agent()
    world.registry.fault = lambda method, path: 401 if path == "/v1/attempts/open" else None
    await world.start_attempt(**ENDLESS)
    report = await world.until_ended()
    assert (report.outcome, report.failure_class) == (AttemptOutcome.FAILED, FailureClass.UNAVAILABLE)
    assert world.process is not None
    assert await asyncio.wait_for(world.process.wait(), 30) == 2
    await world.until(lambda: world.mine(Heartbeat)[-1].stopping, 10)


async def test_a_node_is_announced_once_the_registry_answers(world: AgentWorld) -> None:
    world.registry.fault = lambda method, path: 503
    starting = asyncio.create_task(world.start_agent())
    await world.until(lambda: "takes no work before it does" in world.agent_log(), 30)
    assert world.mine(AgentStarted) == []
    world.registry.fault = lambda method, path: None
    assert (await asyncio.wait_for(starting, 30)).node == world.node
