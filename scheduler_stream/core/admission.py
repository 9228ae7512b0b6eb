"""Which agent is a node: one at a time.

A node's name belongs to the agent that has it for as long as its lease holds. Its successor in the same folder may take it at once: the folder's lock says that
the one before is dead. Any other agent waits until the lease has run out, so that two machines with one name never train one job, nor take turns in ending each
other's work. It is told so, and announces itself again.
"""

from __future__ import annotations

from dataclasses import replace

from opentinker.schemas.messages import alerts, placements, reports
from opentinker.schemas.topics import PLACEMENTS

from .effects import Effects, Output
from .entities import Node
from .policy import COMMAND_RESEND_MS, NAME_ALERT_MS

__all__ = ["is_refused", "tell_refused"]


def is_refused(effects: Effects, known: Node | None, report: reports.AgentStarted) -> bool:
    """Whether another agent, which may be alive, has the name. Tells the one that announced itself, and people."""
    if known is None or report.incarnation == known.incarnation or _succeeds(report, known):
        return False
    lease = effects.state.leases.get(known.name)
    if lease is None or lease.expires_at <= effects.now or (known.stopping and not known.alive):
        return False
    if not known.name_alerted_at or effects.now - known.name_alerted_at >= NAME_ALERT_MS:
        known = replace(known, name_alerted_at=max(1, effects.now))
        effects.state.put(known)
        effects.alert(
            known.name,
            alerts.NodeNameTaken(
                node=known.name, pool=known.pool, held_by=known.incarnation, held_at=known.address,
                refused=report.incarnation, refused_at=report.address, time_ms=effects.broker_ms,
            ),
        )  # fmt: skip
    tell_refused(effects, known, report.incarnation)
    return True


def tell_refused(effects: Effects, known: Node, incarnation: str) -> None:
    """Tell an agent that the name is another's. Every few seconds at most, whoever asks."""
    if known.refused_at and effects.now - known.refused_at < COMMAND_RESEND_MS:
        return
    effects.state.put(replace(known, refused_at=max(1, effects.now)))
    message = placements.RefuseAgent(node=known.name, incarnation=incarnation, held_by=known.incarnation, held_at=known.address)
    effects.outputs.append(Output(topic=PLACEMENTS, key=known.name, message=message))


def _succeeds(report: reports.AgentStarted, known: Node) -> bool:
    """A copy of the folder on another machine is no successor: its boot differs, and it waits like any other."""
    return report.previous_incarnation == known.incarnation and report.boot_id == known.boot_id
