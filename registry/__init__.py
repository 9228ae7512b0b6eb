"""The registry remembers: checkpoints, models, lineage, job history and metrics. PostgreSQL holds records, S3 holds bytes.

Run it with `python -m opentinker.registry`. `read` is the read side that producers may import.
"""
