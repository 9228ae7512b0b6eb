"""The gateway: jobs over HTTP, live. Run it with `python -m opentinker.producers.gateway`."""
