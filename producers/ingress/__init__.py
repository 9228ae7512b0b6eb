"""The ingress: requests of other systems in, commands and replies out. Run it with `python -m opentinker.producers.ingress`."""
