"""`make bench-faults`: the fault campaign. Every step of the scheduler's cycle and takeover, killed and stopped; every service, killed, stopped and away.

Between them, 200 takeovers after kill -9, one at a time. Says of each fault how often it was tried and how often it was seen to bite, and what the
checker found afterwards. FAULTS_MINUTES bounds the campaigns (default 30 each), FAULTS_ROUNDS the repetitions.
`python tests/benchmarks/faults.py scheduler|takeovers|services` runs one part.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from campaign import Fault, takeover_times, worker_name
from checker import Checked, check, marks
from drill import Drill, drained, drill
from failpoints import NAMES
from fleet import Fleet, Submitter, pools_of
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import settings_of
from opentinker.compose.runtime.settings import KafkaSettings
from own_stack import clean_environment, own_stack
from report import Figure, quantile, report
from scheduler_process import Worker
from service_drill import CHECKPOINT_EVERY_S, ServiceDrill, ServiceReport
from service_faults import FAULTS

_MINUTES = float(os.environ.get("FAULTS_MINUTES", "30"))
_JOBS_PER_S = 50


def scheduler(home: Path, rounds: int) -> list[Figure]:
    settings = settings_of(home)
    environment = clean_environment(home)
    faults = [Fault(place, action) for _ in range(rounds) for action in ("stop", "kill") for place in NAMES]
    done = asyncio.run(
        drill(settings.kafka, environment, home / "drill", faults, jobs_per_s=_JOBS_PER_S, time_s=_MINUTES * 60, stopped_s=20, say=_say)
    )
    _table(
        Counter(f"{o.fault.action} at {o.fault.place}" for o in done.outcomes),
        Counter(f"{o.fault.action} at {o.fault.place}" for o in done.outcomes if o.bit_at),
    )
    for outcome in done.outcomes:
        if not outcome.bit_at:
            print(f"did not bite: {outcome.fault} {outcome.ended}")
    return _scheduler_figures(done)


def _scheduler_figures(done: Drill) -> list[Figure]:
    checked, said = done.checked, sum((outcome.said for outcome in done.outcomes), Counter[str]())
    for problem in checked.problems:
        print(f"PROBLEM {problem}")
    times = takeover_times(((each.bit_at, each.worker, each.partition) for each in done.outcomes if each.bit_at), checked)
    return [
        Figure(name="scheduler faults that bit", value=sum(bool(o.bit_at) for o in done.outcomes), unit="faults", beside=("tried", len(done.outcomes))),
        Figure(name="accepted jobs", value=checked.accepted, unit="jobs", beside=("ended exactly once", sum(checked.ended.values()))),
        Figure(name="problems found by the checker", value=len(checked.problems), unit="", goal=0),
        Figure(name="owners that started", value=len(checked.owners), unit=""),
        Figure(name="takeovers after a fault", value=len(times), unit=""),
        Figure(name="takeover p50, session timeout of 6 s included", value=quantile(times, 0.5), unit="s"),
        Figure(name="takeover p95, faults one upon the other", value=quantile(times, 0.95), unit="s"),
        Figure(name="void journal records of former owners", value=checked.voids, unit=""),
        Figure(name="outputs published again under their ids", value=checked.repeated, unit="", beside=("outputs", checked.outputs)),
        Figure(name="owners found superseded, or fenced", value=said["SupersededError"] + said["ProducerFenced"], unit="times named in logs"),
        Figure(name="inputs sent twice", value=done.sent_again, unit=""),
        Figure(name="outsiders' transactions on the inputs", value=done.holes, unit=""),
    ]  # fmt: skip


def takeovers(home: Path, rounds: int) -> list[Figure]:
    """kill -9 of an owner, again and again, each time once everything is owned again."""
    settings = settings_of(home)
    environment = clean_environment(home)
    ends, checked = asyncio.run(_kill_owners(settings.kafka, environment, home / "drill", rounds))
    for problem in checked.problems:
        print(f"PROBLEM {problem}")
    times = takeover_times(ends, checked)
    session_s = settings.scheduler.session_timeout_s
    return [
        Figure(name=f"takeovers after kill -9, under {_JOBS_PER_S} jobs/s", value=len(times), unit="", goal=200, at_least=True),
        Figure(name="jobs lost, run twice or held (checker)", value=len(checked.problems), unit="", goal=0, beside=("accepted", checked.accepted)),
        Figure(name="accepted jobs that ended exactly once", value=sum(checked.ended.values()), unit="jobs", goal=checked.accepted, at_least=True),
        Figure(name="takeover p50", value=quantile(times, 0.5), unit="s", beside=("of it session timeout, s", session_s)),
        Figure(name="takeover p95", value=quantile(times, 0.95), unit="s", goal=10, beside=("of it session timeout, s", session_s)),
        Figure(name="longest takeover", value=max(times, default=0.0), unit="s"),
    ]


async def _kill_owners(
    settings: KafkaSettings, environment: dict[str, str], directory: Path, rounds: int
) -> tuple[list[tuple[float, str, int | None]], Checked]:  # fmt: skip
    pools, since = pools_of(settings.partitions, "takeover"), await marks(settings)
    workers = [Worker(environment, directory / f"worker-{number}.log") for number in range(2)]
    ends: list[tuple[float, str, int | None]] = []
    async with Fleet(settings, pools, nodes=2) as fleet, Submitter(settings, pools) as submitter:
        await asyncio.sleep(10)
        load = asyncio.create_task(submitter.at_rate(_JOBS_PER_S, 10**9))
        try:
            for number in range(rounds):
                await asyncio.sleep(4)
                victim = workers.pop(0)
                ends.append((time.time(), worker_name(victim), None))
                victim.signal(signal.SIGKILL)
                await asyncio.sleep(9)  # the session timeout, and what a takeover takes
                await asyncio.to_thread(victim.stop)
                workers.append(Worker(environment, directory / f"worker-{number + 2}.log"))
                if number % 10 == 9:
                    _say(f"{number + 1} of {rounds} owners killed")
        finally:
            load.cancel()
        await drained(fleet, submitter)
        for worker in workers:
            await asyncio.to_thread(worker.stop)
        return ends, await check(settings, since, pools, fleet.runs)


def services(home: Path, rounds: int) -> list[Figure]:
    work = ServiceDrill(Home(home), say=_say)
    done = asyncio.run(work.run(list(FAULTS) * rounds, time.monotonic() + _MINUTES * 60))
    _table(Counter(each.name for each in done.inflicted), Counter(each.name for each in done.inflicted if each.bit))
    return _service_figures(done)


def _service_figures(done: ServiceReport) -> list[Figure]:
    problems = [*done.checked.problems, *done.overlaps, *done.disagreements]
    for problem in problems:
        print(f"PROBLEM {problem}")
    away = [each.seconds_to_work for each in done.inflicted]
    return [
        Figure(name="service faults that bit", value=sum(each.bit for each in done.inflicted), unit="faults", beside=("tried", len(done.inflicted))),
        Figure(name="jobs that trained CartPole", value=done.jobs, unit="jobs", beside=("ended exactly once", sum(done.checked.ended.values()))),
        Figure(name="completed", value=done.checked.ended["JobCompleted"], unit="jobs", goal=done.jobs, at_least=True),
        Figure(name="problems: topics, /proc, database", value=len(problems), unit="", goal=0),
        Figure(name="attempts that another followed", value=len(done.losses_s), unit=""),
        Figure(name="most training lost by one attempt", value=max(done.losses_s, default=0.0), unit="s", goal=CHECKPOINT_EVERY_S + 3),
        Figure(name="time until trainers worked again, p95", value=quantile(away, 0.95), unit="s"),
    ]


def _table(tried: Counter[str], bit: Counter[str]) -> None:
    for name, count in sorted(tried.items()):
        print(f"  {name:45} tried {count}, bit {bit[name]}")


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main() -> None:
    parts = sys.argv[1:] or ["scheduler", "takeovers", "services"]
    figures: list[Figure] = []
    for part in parts:
        rounds = int(os.environ.get("FAULTS_ROUNDS", {"scheduler": "5", "takeovers": "55", "services": "3"}[part]))
        # Twice as many partitions for the takeovers: each kill moves four of them.
        os.environ["OPENTINKER_KAFKA__PARTITIONS"] = "8" if part == "takeovers" else "4"
        with own_stack(*([] if part == "services" else ["kafka"])) as stack:
            (stack.home / "drill").mkdir()
            figures += {"scheduler": scheduler, "takeovers": takeovers, "services": services}[part](stack.home, rounds)
    report("faults-" + "-".join(parts) if len(parts) == 1 else "faults", figures)


if __name__ == "__main__":
    main()
