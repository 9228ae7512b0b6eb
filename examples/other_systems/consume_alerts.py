"""Listen for what somebody should look at: nodes that are lost or back, records that could not be read.

    python examples/other_systems/consume_alerts.py --bootstrap 127.0.0.1:9092 --count 1

The `ce_type` header says which alert it is; `ce_id` identifies it, so that one told twice is seen to be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid

from confluent_kafka import Consumer, KafkaException

TOPIC = "opentinker.alerts.v1"


def describe(kind: str, alert: dict[str, object]) -> str:
    """One line for a pager."""
    if kind == "NodeLost":
        return (
            f"node {alert['node']} of pool {alert['pool']} is lost: {alert['reason']}; jobs that had a part there: {alert.get('attempts') or 'none'}"
        )
    if kind == "NodeRecovered":
        return f"node {alert['node']} of pool {alert['pool']} is back"
    if kind == "DeadLettered":
        errors = alert["errors"]
        assert isinstance(errors, list)
        first = errors[0]
        return f"{alert['topic']} offset {alert['offset']} could not be read: {first['field'] or 'document'}: {first['message']}; {first['remedy']}"
    return json.dumps(alert)


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
    arguments = argparse.ArgumentParser(description="Print alerts as they come.")
    arguments.add_argument("--bootstrap", required=True, help="address of Kafka")
    arguments.add_argument("--count", type=int, default=None, help="stop after that many alerts")
    arguments.add_argument("--from-beginning", action="store_true", help="what the topic still holds, too")
    given = arguments.parse_args()
    start = "earliest" if given.from_beginning else "latest"
    settings = {"bootstrap.servers": given.bootstrap, "group.id": f"alerts-example-{uuid.uuid4()}", "auto.offset.reset": start}
    consumer = Consumer(settings | {"log_level": 2})  # else the library prints a line for every connection that is refused
    if not answers(consumer, given.bootstrap):
        return 2
    consumer.subscribe([TOPIC])
    print(f"waiting for alerts on {TOPIC}; Ctrl-C ends this", file=sys.stderr)
    seen: set[str] = set()
    try:
        while given.count is None or len(seen) < given.count:
            record = consumer.poll(1.0)
            if record is None or record.error():
                continue
            headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers() or []}
            if headers.get("ce_id", "") in seen:
                continue
            seen.add(headers.get("ce_id", ""))
            kind = headers.get("ce_type", "").removeprefix("io.opentinker.").partition(".")[0]
            print(f"{kind}: {describe(kind, json.loads(record.value()))}", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        consumer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
