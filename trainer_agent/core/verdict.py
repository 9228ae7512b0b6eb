"""What a part came to, given how its processes ended: outcome, class and one message. One reason for a gang that failed for one reason."""

from __future__ import annotations

from dataclasses import dataclass

from opentinker.schemas.messages.reports import AttemptOutcome, FailureClass
from opentinker.trainer_agent.core.parts import Part, Replica
from opentinker.trainer_agent.protocol import ExitCode, TrainerOutcome

__all__ = ["Verdict", "judge", "judge_replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    outcome: AttemptOutcome
    failure_class: FailureClass | None = None
    message: str = ""


_FAILURES = {
    TrainerOutcome.USER_ERROR: FailureClass.USER_ERROR,
    TrainerOutcome.OUT_OF_MEMORY: FailureClass.OUT_OF_MEMORY,
    TrainerOutcome.NON_FINITE: FailureClass.NON_FINITE,
    TrainerOutcome.INFRASTRUCTURE: FailureClass.INFRASTRUCTURE,
}
_BY_EXIT_CODE = {outcome.exit_code: outcome for outcome in TrainerOutcome}
# The most telling first: when one replica fails for a reason of its own, the others fail because it is gone.
_TELLING = (FailureClass.USER_ERROR, FailureClass.NON_FINITE, FailureClass.OUT_OF_MEMORY, FailureClass.START_FAILED, FailureClass.INFRASTRUCTURE)


def judge(part: Part) -> Verdict:
    """The verdict on a part whose processes are gone."""
    if part.failure:
        return Verdict(outcome=AttemptOutcome.FAILED, failure_class=FailureClass(part.failure_class), message=part.failure)
    verdicts = [judge_replica(replica) for replica in part.replicas if replica.started]
    if verdicts and all(verdict.outcome is AttemptOutcome.SUCCEEDED for verdict in verdicts):
        return verdicts[0]
    if part.told_to_stop:
        # Also what failed while it ended: it was ending anyway, and peers that go first look like failures to those that are left.
        stopped = next((verdict for verdict in verdicts if verdict.outcome is AttemptOutcome.STOPPED), None)
        return Verdict(outcome=AttemptOutcome.STOPPED, message=stopped.message if stopped else "stopped as told")
    failures = [verdict for verdict in verdicts if verdict.outcome is AttemptOutcome.FAILED]
    if failures:
        return min(failures, key=lambda verdict: _TELLING.index(verdict.failure_class or FailureClass.INFRASTRUCTURE))
    stopped = next((verdict for verdict in verdicts if verdict.outcome is AttemptOutcome.STOPPED), None)
    return stopped or Verdict(outcome=AttemptOutcome.STOPPED, message="nothing was started")


def judge_replica(replica: Replica) -> Verdict:
    """The verdict on one process that is gone. What it said counts; without a word, its exit code.

    Death by a signal is infrastructure; an exit code that is none of ours, once the environment runs, is the environment's doing.
    """
    word, code = replica.last_word, replica.exit_code
    outcome = word.outcome if word is not None else _BY_EXIT_CODE.get(ExitCode(code)) if code in set(ExitCode) else None
    message = word.message if word is not None else _silent_end(replica)
    if outcome is TrainerOutcome.SUCCEEDED and word is None:
        # Exit 0 without the last word is not success: nobody said that a stop rule held and the model is safe.
        return Verdict(outcome=AttemptOutcome.FAILED, failure_class=FailureClass.INFRASTRUCTURE, message="ended without saying how")
    if outcome is TrainerOutcome.SUCCEEDED:
        return Verdict(outcome=AttemptOutcome.SUCCEEDED, message=message)
    if outcome is TrainerOutcome.STOPPED or replica.killed:
        return Verdict(outcome=AttemptOutcome.STOPPED, message=message)
    failure = FailureClass.INFRASTRUCTURE if outcome is None else _FAILURES[outcome]
    if outcome is None and replica.ready and code is not None and code > 0:
        failure = FailureClass.USER_ERROR  # the trainer always says a last word and knows its codes: the environment's own code ended the process
    if failure is FailureClass.INFRASTRUCTURE and not replica.ready:
        failure = FailureClass.START_FAILED
    return Verdict(outcome=AttemptOutcome.FAILED, failure_class=failure, message=message)


def _silent_end(replica: Replica) -> str:
    code = replica.exit_code
    if replica.killed:
        return f"replica {replica.rank} did not end within its grace and was killed"
    if code is not None and code < 0:
        return f"replica {replica.rank} was killed by signal {-code}"
    if replica.ready and code is not None and code not in set(ExitCode):
        return f"replica {replica.rank}: the environment's code ended the process with exit status {code}; raise an exception instead, its log may say more"
    return f"replica {replica.rank} exited with {code} without a last word; its log says why"
