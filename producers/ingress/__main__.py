"""`python -m opentinker.producers.ingress`: the ingress as a process."""

from opentinker.compose.runtime.service import run
from opentinker.producers.ingress.service import main

if __name__ == "__main__":
    run("ingress", main)
