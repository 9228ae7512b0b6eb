"""`make bench-faults`: the fault campaign. Every step of the scheduler's cycle and takeover, killed and stopped; every service, killed, stopped and away.

Says of each fault how often it was tried and how often it was seen to bite, and what the checker found afterwards. FAULTS_MINUTES bounds each of the two
parts (default 30), FAULTS_ROUNDS the repetitions (default 5 and 3). `python tests/benchmarks/faults.py scheduler|services` runs one of them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from campaign import Fault, takeover_times
from drill import Drill, drill
from failpoints import NAMES
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import UpOptions, settings_of
from opentinker.compose.local.progress import SilentProgress
from opentinker.compose.local.stack import down, up
from report import Figure, quantile, report
from service_drill import CHECKPOINT_EVERY_S, FAULTS, ServiceDrill, ServiceReport

_MINUTES = float(os.environ.get("FAULTS_MINUTES", "30"))
_JOBS_PER_S = 50


def scheduler(home: Path, rounds: int) -> list[Figure]:
    settings = settings_of(home)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENTINKER_")} | {"OPENTINKER_HOME": str(home)}
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
    times = takeover_times(done.outcomes, checked)
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
    parts = sys.argv[1:] or ["scheduler", "services"]
    figures: list[Figure] = []
    for part in parts:
        rounds = int(os.environ.get("FAULTS_ROUNDS", "5" if part == "scheduler" else "3"))
        home = Home(Path(tempfile.mkdtemp(prefix=f"opentinker-faults-{part}-")))
        (home.root / "drill").mkdir(parents=True)
        try:
            up(home, UpOptions(only=("kafka",) if part == "scheduler" else (), usual_ports=False, ends_with_caller=True), SilentProgress())
            figures += scheduler(home.root, rounds) if part == "scheduler" else services(home.root, rounds)
        finally:
            down(home, SilentProgress())
            shutil.rmtree(home.root, ignore_errors=True)
    report("faults-" + "-".join(parts) if len(parts) == 1 else "faults", figures)


if __name__ == "__main__":
    main()
