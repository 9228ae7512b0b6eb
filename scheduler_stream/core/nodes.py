"""Nodes and what their agents report: announcements, heartbeats, ended parts, leases that run out.

A heartbeat is compared with the state: an attempt that should be there and is not is lost; one that should not be there is stopped. Only commands that
the agent says it has applied are judged by their absence; others are sent again. A report that is older than another one that was heard, a copy that comes
late, says what was and counts for nothing. An agent that was told to end says so: its jobs make a last checkpoint and
go on elsewhere, and its silence afterwards is no loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from opentinker.schemas.messages import alerts, jobs, reports
from opentinker.schemas.messages.jobs import JobPhase
from opentinker.schemas.messages.reports import AttemptOutcome, AttemptPhase, FailureClass

from .admission import is_refused, tell_refused
from .attempts import change_part, free_allocation, lose_part, next_command, settle, stop_attempt, train
from .brake import may_evict, may_stop_unknown, node_returned
from .effects import Effects
from .entities import Allocation, Attempt, AttemptKey, DeviceSlot, Node, NodeLease, Part, Result, Taint, Training, attempt_key
from .lifecycle import PART_OVER, JobMove, PartMove, PartPhase, StopCause
from .policy import COMMAND_RESEND_MAX_MS, COMMAND_RESEND_MS, COMMAND_SEQ_ADOPTED_MAX, ENDED_KEPT_MAX, FIGURE_MAX

__all__ = ["agent_started", "attempt_ended", "cordon", "expire_lease", "heartbeat"]


def agent_started(effects: Effects, report: reports.AgentStarted) -> None:
    """A node's agent is new (its unadopted attempts are gone), or announces itself again (nothing is), or is not the node's."""
    state = effects.state
    known = state.nodes.get(report.node)
    if is_refused(effects, known, report):
        return
    lease = state.leases.get(report.node)
    same = known is not None and known.incarnation == report.incarnation
    if same and lease is not None and report.sequence < lease.sequence:
        return
    listed = {attempt_key(item) for item in report.adopted}
    # An agent that has applied more than we have sent knew another journal: numbers that it has seen would be passed over.
    applied_before = min(report.applied_seq, COMMAND_SEQ_ADOPTED_MAX)
    had = _parts_on(effects, report.node)
    allocations = known.allocations if known else ()
    if not same:
        allocations = tuple(held for held in allocations if attempt_key(held) in listed)
    node = Node(
        name=report.node,
        pool=report.pool,
        incarnation=report.incarnation,
        boot_id=report.boot_id,
        cpu_millis=report.capacity.cpu_millis,
        memory_bytes=report.capacity.memory_bytes,
        devices=_devices(report.capacity),
        labels=report.labels,
        taints=tuple(sorted(Taint(taint.key, taint.value) for taint in report.taints)),
        address=report.address,
        port_low=report.port_low,
        port_high=report.port_high,
        lease_timeout_ms=report.lease_timeout_ms,
        stopping=known.stopping if known and same else False,
        cordoned=known.cordoned if known else False,
        command_seq=max(known.command_seq if known and same else 0, applied_before),
        allocations=allocations,
    )
    state.put(node)
    applied = max(lease.applied_seq if lease and same else 0, applied_before)
    expires_at = effects.now + node.lease_timeout_ms
    state.put(NodeLease(node=node.name, expires_at=expires_at, applied_seq=applied, heard_ms=effects.broker_ms, sequence=report.sequence))
    state.capacity_freed(node.pool)
    if known is not None and not known.alive:
        state.timer(effects.now + node.lease_timeout_ms, "lease", node.name)
        if not known.stopping:
            _recovered(effects, node)
    if not same:
        _adopt(effects, node, had, listed)
    _judge_listed(effects, node.name, report.adopted, heartbeat_sequence=None)


def _adopt(effects: Effects, node: Node, had: list[tuple[Attempt, Part]], listed: set[AttemptKey]) -> None:
    """Carry live parts over to the new incarnation; those it does not have are lost."""
    for attempt, part in had:
        if attempt_key(attempt) in listed:
            attempt = change_part(effects, attempt, part, incarnation=node.incarnation, start_seq=0, stop_seq=0, resume_seq=0)
            if attempt.stop is not None:
                stop_attempt(effects, attempt, attempt.stop, attempt.stop_message)
        else:
            lose_part(effects, attempt, part, f"the agent of node {node.name} restarted without it")


def heartbeat(effects: Effects, report: reports.Heartbeat) -> None:
    """Extend the node's lease and compare what it runs with what it should run. Reports of other incarnations are void, and answered."""
    state = effects.state
    node, lease = state.nodes.get(report.node), state.leases.get(report.node)
    if node is None or lease is None:
        return
    if node.incarnation != report.incarnation:
        tell_refused(effects, node, report.incarnation)
        return
    if report.sequence <= lease.sequence:
        return
    if report.stopping:
        node = _stop_node(effects, node)
    elif not node.alive and not node.stopping:
        node = replace(node, alive=True)
        state.put(node)
        _recovered(effects, node)
        state.timer(effects.now + node.lease_timeout_ms, "lease", node.name)
        state.capacity_freed(node.pool)
    if report.capacity is not None:
        node = replace(
            node,
            cpu_millis=report.capacity.cpu_millis,
            memory_bytes=report.capacity.memory_bytes,
            devices=_devices(report.capacity),
        )
        state.put(node)
        state.capacity_freed(node.pool)
    applied = max(lease.applied_seq, report.applied_seq)
    expires_at = effects.now + node.lease_timeout_ms
    state.put(replace(lease, expires_at=expires_at, applied_seq=applied, heard_ms=effects.broker_ms, sequence=report.sequence))
    _judge_listed(effects, node.name, report.attempts, report.sequence)
    _judge_missing(effects, node.name, report, applied)
    node = state.nodes[node.name]
    if report.stopping and node.alive and not report.attempts and not node.allocations:
        state.put(replace(node, alive=False))  # its last word


def _stop_node(effects: Effects, node: Node) -> Node:
    """Its agent was told to end, and ends its trainers with a checkpoint: their gangs stop whole, and use up no retry."""
    if node.stopping:
        return node
    node = replace(node, stopping=True)
    effects.state.put(node)
    effects.state.capacity_freed(node.pool)  # the pool has shrunk: waiting jobs may need another reason
    for attempt, _ in _parts_on(effects, node.name):
        if attempt.stop is None:
            stop_attempt(effects, attempt, StopCause.NODE_STOPPING, f"node {node.name} is being stopped")
    return effects.state.nodes[node.name]


def _recovered(effects: Effects, node: Node) -> None:
    effects.alert(node.name, alerts.NodeRecovered(node=node.name, pool=node.pool, time_ms=effects.broker_ms))
    node_returned(effects, node.pool, node.name)


def _judge_listed(effects: Effects, node_name: str, listed: Iterable[reports.AttemptProgress], heartbeat_sequence: int | None) -> None:
    """Follow what is live; stop what is not."""
    ended = set(effects.state.nodes[node_name].ended)
    for item in listed:
        if attempt_key(item) in ended:
            continue  # sent before the agent knew that its report of the end had arrived
        attempt = effects.state.attempts.get(item.job_uid)
        part = _part_of(attempt, node_name)
        if attempt is None or part is None or attempt_key(attempt) != attempt_key(item):
            _stop_unknown(effects, node_name, item)
        elif part.phase in PART_OVER:
            _stop_unknown(effects, node_name, item)  # given up as lost, and back again
        else:
            _follow(effects, attempt, part, item, heartbeat_sequence)


def _follow(effects: Effects, attempt: Attempt, part: Part, item: reports.AttemptProgress, heartbeat_sequence: int | None) -> None:
    if not part.taken_up:
        part = replace(part, taken_up=True)
        attempt = change_part(effects, attempt, part)
    if item.phase is AttemptPhase.PAUSED:
        if part.phase is not PartPhase.PAUSED:
            attempt = change_part(effects, attempt, part, PartMove.PAUSE, replicas_running=0)
        if heartbeat_sequence is not None:
            _resume(effects, attempt, part.node, heartbeat_sequence)
    elif item.phase is AttemptPhase.RUNNING:
        move = PartMove.RUN if part.phase is not PartPhase.RUNNING else None
        if move or part.replicas_running != item.replicas_running:
            attempt = change_part(effects, attempt, part, move, replicas_running=item.replicas_running, resume_seq=0)
    if 0 in part.ranks:
        attempt = train(effects, attempt, _training(item))
    job = effects.state.jobs[attempt.job_uid]
    if job.phase is JobPhase.STARTING and all(other.phase is PartPhase.RUNNING for other in attempt.parts):
        effects.state.put(replace(attempt, running_at=effects.now))
        fields = {"attempt_number": attempt.attempt_number}
        started = job.started_ms if job.started_ms is not None else effects.broker_ms
        effects.move_job(job, JobMove.RUN, jobs.AttemptRunning, fields, started_ms=started, uncounted=0)


def _resume(effects: Effects, attempt: Attempt, node_name: str, heartbeat_sequence: int) -> None:
    """The lease still holds, or the part would be lost: a paused part may go on. Told again while it stays paused."""
    part = _part_of(attempt, node_name)
    assert part is not None
    if attempt.stop is not None or (part.resume_seq and effects.now - part.sent_at < _resend_ms(part.sent_again)):
        return
    again = part.sent_again + 1 if part.resume_seq else 0
    attempt = change_part(effects, attempt, part, resume_seq=next_command(effects, node_name), sent_at=effects.now, sent_again=again)
    told = _part_of(attempt, node_name)
    assert told is not None
    effects.resume_command(effects.state.jobs[attempt.job_uid], attempt, told, heartbeat_sequence)


def _stop_unknown(effects: Effects, node_name: str, item: reports.AttemptProgress) -> None:
    """Stop what is not live, and hold its place on the node until it is gone. Told again every few seconds."""
    node = effects.state.nodes[node_name]
    held = next((a for a in node.allocations if attempt_key(a) == attempt_key(item)), None)
    if held is not None and held.stop_sent_at and effects.now - held.stop_sent_at < _resend_ms(held.stop_sent_again):
        return
    allowed = may_stop_unknown(effects, node.pool, item.job_uid) if held is None or held.unknown else True
    if not allowed:
        if held is None:
            effects.state.put(replace(node, allocations=(*node.allocations, _unknown(item))))
        return
    seq = next_command(effects, node_name)
    node = effects.state.nodes[node_name]
    if held is None:
        held = _unknown(item)
    others = tuple(a for a in node.allocations if attempt_key(a) != attempt_key(item))
    told = replace(held, stop_sent_at=max(1, effects.now), stop_sent_again=held.stop_sent_again + 1 if held.stop_sent_at else 0)
    effects.state.put(replace(node, allocations=(*others, told)))
    effects.stop_unknown(node.name, node.incarnation, seq, item.job_uid, item.attempt_number, item.lease_epoch)


def _unknown(item: reports.AttemptProgress) -> Allocation:
    return Allocation(
        job_uid=item.job_uid, attempt_number=item.attempt_number, lease_epoch=item.lease_epoch,
        cpu_millis=0, memory_bytes=0, devices=(), unknown=True,
    )  # fmt: skip


def _judge_missing(effects: Effects, node_name: str, report: reports.Heartbeat, applied: int) -> None:
    """What the node does not list: lost if its command was applied, sent again if not, freed if it was over anyway."""
    listed = {attempt_key(item) for item in report.attempts}
    for attempt, part in _parts_on(effects, node_name):
        if part.start_seq > applied:
            _send_again(effects, attempt, part, applied)
        elif attempt_key(attempt) not in listed:
            lose_part(effects, attempt, part, f"node {node_name} no longer has it")
        elif part.stop_seq > applied:
            _send_again(effects, attempt, part, applied)
    node = effects.state.nodes[node_name]
    still_listed = tuple(key for key in node.ended if key in listed)
    if still_listed != node.ended:
        effects.state.put(replace(node, ended=still_listed))
    for held in effects.state.nodes[node_name].allocations:
        if attempt_key(held) in listed:
            continue
        live = effects.state.attempts.get(held.job_uid)
        if live is None or attempt_key(live) != attempt_key(held) or _is_over(live, node_name):
            free_allocation(effects, effects.state.nodes[node_name], attempt_key(held))


def _resend_ms(times: int) -> int:
    """How long a command that was repeated so often waits for its effect. Heartbeats that queued up speak of a time before any of it."""
    wait: int = min(COMMAND_RESEND_MS * 2 ** min(times, 10), COMMAND_RESEND_MAX_MS)
    return wait


def _send_again(effects: Effects, attempt: Attempt, part: Part, applied: int) -> None:
    """Publish commands that the agent has not applied, as new outputs with the numbers they had."""
    if effects.now - part.sent_at < _resend_ms(part.sent_again):
        return
    attempt = change_part(effects, attempt, part, sent_at=effects.now, sent_again=part.sent_again + 1)
    job, again = effects.state.jobs[attempt.job_uid], _part_of(attempt, part.node)
    assert again is not None
    if again.start_seq > applied:
        effects.start_command(job, attempt, again)
    if again.stop_seq > applied:
        effects.stop_command(job, attempt, again)


def attempt_ended(effects: Effects, report: reports.AttemptEnded) -> None:
    """One node's part is over and its processes are gone. Reports about attempts that are not live free their place, no more."""
    node = effects.state.nodes.get(report.node)
    if node is not None:
        if node.incarnation == report.incarnation:
            node = replace(node, ended=(*node.ended, attempt_key(report))[-ENDED_KEPT_MAX:])
            effects.state.put(node)
        free_allocation(effects, node, attempt_key(report))
    attempt = effects.state.attempts.get(report.job_uid)
    part = _part_of(attempt, report.node)
    if attempt is None or part is None or part.phase in PART_OVER:
        return
    if attempt_key(attempt) != attempt_key(report):
        return
    attempt = change_part(effects, attempt, part, PartMove.END, replicas_running=0)
    if 0 in part.ranks:
        attempt = train(effects, attempt, _final_training(attempt, report))
    attempt = _decide(effects, attempt, part, report)
    settle(effects, attempt)


def _decide(effects: Effects, attempt: Attempt, part: Part, report: reports.AttemptEnded) -> Attempt:
    """Rank 0 decides success; any part decides failure; the first decision stands."""
    if report.outcome is AttemptOutcome.SUCCEEDED:
        if 0 not in part.ranks:
            return attempt
        version = report.model.version if report.model else 0
        result = Result(outcome=AttemptOutcome.SUCCEEDED, message=report.message, stop_reason=report.stop_reason, model_version=version)
        return stop_attempt(effects, attempt, StopCause.GANG_SUCCEEDED, report.stop_reason, result)
    if report.outcome is AttemptOutcome.FAILED:
        failure = report.failure_class or FailureClass.INFRASTRUCTURE
        message = f"rank {', '.join(map(str, report.ranks))} on {report.node}: {report.message}"
        return stop_attempt(
            effects, attempt, StopCause.GANG_FAILED, message, Result(outcome=AttemptOutcome.FAILED, failure_class=failure, message=message)
        )
    if attempt.stop is None:
        message = f"node {report.node} stopped it without being told: {report.message}"
        lost = Result(outcome=AttemptOutcome.FAILED, failure_class=FailureClass.INFRASTRUCTURE, message=message)
        return stop_attempt(effects, attempt, StopCause.GANG_FAILED, message, lost)
    return attempt


def expire_lease(effects: Effects, node_name: str) -> None:
    """Without a heartbeat for the lease's time the node is given up; what it held stays held until it is heard of again.

    Under the brake its attempts are not given up yet: it comes here again when the brake lets go.
    """
    node, lease = effects.state.nodes.get(node_name), effects.state.leases.get(node_name)
    if node is None or lease is None:
        return
    if lease.expires_at > effects.now:
        effects.state.timer(lease.expires_at, "lease", node_name)
        return
    reason = f"no heartbeat for {node.lease_timeout_ms / 1000:g} s"
    if node.alive:
        effects.state.put(replace(node, alive=False))
        held = tuple(sorted(attempt.job_uid for attempt, _ in _parts_on(effects, node_name)))
        if not node.stopping:
            effects.alert(node_name, alerts.NodeLost(node=node_name, pool=node.pool, reason=reason, attempts=held, time_ms=effects.broker_ms))
    elif not _parts_on(effects, node_name):
        return  # given up long ago: its timer is only back since a worker built its timers anew, and it falls silent no second time
    if not node.stopping and not may_evict(effects, node.pool, node_name):
        return
    for attempt, part in _parts_on(effects, node_name):
        current = effects.state.attempts.get(attempt.job_uid)
        if current is not None:
            lose_part(effects, current, part, f"node {node_name} was lost: {reason}")
    # The pool has shrunk: waiting jobs may need another reason.
    effects.state.capacity_freed(node.pool)


def cordon(effects: Effects, node_name: str, cordoned: bool) -> None:
    node = effects.state.nodes.get(node_name)
    if node is not None and node.cordoned != cordoned:
        effects.state.put(replace(node, cordoned=cordoned))
        effects.state.capacity_freed(node.pool)


def _parts_on(effects: Effects, node_name: str) -> list[tuple[Attempt, Part]]:
    """Live parts on a node, by way of its allocations, in job order."""
    node = effects.state.nodes.get(node_name)
    found = []
    for job_uid in sorted({held.job_uid for held in node.allocations} if node else ()):
        attempt = effects.state.attempts.get(job_uid)
        part = _part_of(attempt, node_name)
        if attempt is not None and part is not None and part.phase not in PART_OVER:
            found.append((attempt, part))
    return found


def _part_of(attempt: Attempt | None, node_name: str) -> Part | None:
    return next((part for part in attempt.parts if part.node == node_name), None) if attempt else None


def _is_over(attempt: Attempt, node_name: str) -> bool:
    part = _part_of(attempt, node_name)
    return part is None or part.phase in PART_OVER


def _devices(capacity: reports.NodeCapacity) -> tuple[DeviceSlot, ...]:
    slots = {device.index: DeviceSlot(index=device.index, kind=device.kind, simulated=device.simulated) for device in capacity.devices}
    return tuple(slots[index] for index in sorted(slots))


def _training(item: reports.AttemptProgress) -> Training:
    return Training(
        global_step=item.global_step,
        total_steps=item.total_steps,
        env_steps_per_s=_whole(item.env_steps_per_s),
        mean_return_milli=None if item.mean_return is None else _whole(item.mean_return * 1000),
        episodes=item.episodes,
        checkpoint_id=item.checkpoint_id,
        checkpoint_step=item.checkpoint_step,
    )


def _whole(value: float) -> int:
    """Rounded, and cut to what the journal can hold: an environment may pay any reward."""
    return round(max(-FIGURE_MAX, min(FIGURE_MAX, value)))


def _final_training(attempt: Attempt, report: reports.AttemptEnded) -> Training:
    """The last word on training; what the report does not know stays as it was."""
    before = attempt.training
    return replace(
        before,
        global_step=max(before.global_step, report.global_step),
        episodes=max(before.episodes, report.episodes),
        mean_return_milli=before.mean_return_milli if report.mean_return is None else _whole(report.mean_return * 1000),
        checkpoint_id=report.checkpoint_id or before.checkpoint_id,
        checkpoint_step=max(before.checkpoint_step, report.checkpoint_step),
        env_steps_per_s=0,
    )
