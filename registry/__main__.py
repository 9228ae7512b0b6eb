"""`python -m opentinker.registry`: the registry as a process."""

from opentinker.compose.runtime.service import run

from .service import main

if __name__ == "__main__":
    run("registry", main)
