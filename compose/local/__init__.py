"""The local stack: real Kafka, PostgreSQL and S3 from packages, our services beside them, all supervised, no Docker.

`stack.py` is the story (up, down, status); the other modules are its parts. Everything binds to 127.0.0.1 and lives under `$OPENTINKER_HOME`.
"""
