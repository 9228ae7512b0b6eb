"""`python -m opentinker.trainer_agent`: the agent of one node."""

from __future__ import annotations

from opentinker.compose.runtime.service import run
from opentinker.trainer_agent.agent import run_agent

if __name__ == "__main__":
    run("agent", run_agent)
