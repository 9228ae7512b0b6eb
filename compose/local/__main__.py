"""`python -m opentinker.compose.local up|down|status|restart`."""

from opentinker.compose.local.cli import main

if __name__ == "__main__":
    main()
