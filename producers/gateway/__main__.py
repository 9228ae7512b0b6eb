"""`python -m opentinker.producers.gateway`: the gateway as a process."""

from opentinker.compose.runtime.service import run
from opentinker.producers.gateway.service import main

if __name__ == "__main__":
    run("gateway", main)
