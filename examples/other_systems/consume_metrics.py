"""Follow training metrics from another system: one line per sample, for one job or all.

    python examples/other_systems/consume_metrics.py --bootstrap 127.0.0.1:9092 --job JOB_UID --count 10

`(job_uid, attempt_number, replica_rank, global_step)` identifies a sample: a consumer that keeps them by this key counts none twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid

from confluent_kafka import Consumer, KafkaException

TOPIC = "opentinker.training.metrics.v1"


def answers(consumer: Consumer, bootstrap: str) -> bool:
    """Whether Kafka is there and has the topic: a consumer alone would wait for ever, and say nothing."""
    try:
        known = consumer.list_topics(TOPIC, timeout=5).topics[TOPIC].error is None
    except KafkaException:
        print(f"no answer from Kafka at {bootstrap}; `opentinker status` shows its address", file=sys.stderr)
        return False
    if not known:
        print(f"Kafka at {bootstrap} has no topic {TOPIC}, or this user may not read it", file=sys.stderr)
    return known


def main() -> int:
    arguments = argparse.ArgumentParser(description="Print training metrics as they come.")
    arguments.add_argument("--bootstrap", required=True, help="address of Kafka")
    arguments.add_argument("--job", default=None, help="only this job's uid")
    arguments.add_argument("--count", type=int, default=None, help="stop after that many samples")
    arguments.add_argument("--from-beginning", action="store_true", help="what the topic still holds, too")
    given = arguments.parse_args()
    start = "earliest" if given.from_beginning else "latest"
    settings = {"bootstrap.servers": given.bootstrap, "group.id": f"metrics-example-{uuid.uuid4()}", "auto.offset.reset": start}
    consumer = Consumer(settings | {"log_level": 2})  # else the library prints a line for every connection that is refused
    if not answers(consumer, given.bootstrap):
        return 2
    consumer.subscribe([TOPIC])
    print(f"waiting for metrics on {TOPIC}; Ctrl-C ends this", file=sys.stderr)
    seen: set[tuple[object, ...]] = set()
    try:
        while given.count is None or len(seen) < given.count:
            record = consumer.poll(1.0)
            if record is None or record.error():
                continue
            sample = json.loads(record.value())
            identity = tuple(sample[name] for name in ("job_uid", "attempt_number", "replica_rank", "global_step"))
            if identity in seen or (given.job and sample["job_uid"] != given.job):
                continue
            seen.add(identity)
            values = sample["values"]
            # NaN and infinities come as the strings "NaN", "Infinity", "-Infinity"; float() reads them.
            mean = values.get("mean_return")
            shown = "       -" if mean is None else f"{float(mean):8.2f}"  # none before the first episode has ended
            print(f"{sample['job_uid']} step {sample['global_step']:>9,} mean return {shown}", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        consumer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
