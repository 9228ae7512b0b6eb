"""Publish training jobs with confluent-kafka and its default settings, and print the answers.

    python examples/other_systems/publish_confluent.py --bootstrap 127.0.0.1:9092 examples/cartpole-v1.json

Any partitioner and any key will do: the request topic is the public door. The reply says `job_uid`, or which field is wrong and what to do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

REQUESTS, REPLIES = "opentinker.jobs.requests.v1", "opentinker.jobs.replies.v1"


def main() -> int:
    arguments = argparse.ArgumentParser(description="Publish manifests to the request topic and wait for their answers.")
    arguments.add_argument("manifests", nargs="+", type=Path)
    arguments.add_argument("--bootstrap", required=True, help="address of Kafka")
    arguments.add_argument("--id", action="append", default=[], help="ce_id of each manifest in turn; the same id is the same job")
    given = arguments.parse_args()
    if len(given.id) > len(given.manifests):
        arguments.error("more --id than manifests: each names one manifest, in turn")
    ids = given.id + [f"confluent-{uuid.uuid4()}" for _ in given.manifests[len(given.id) :]]

    missing = [str(path) for path in given.manifests if not path.is_file()]
    if missing:
        print(f"no file {', '.join(missing)}", file=sys.stderr)
        return 2
    try:
        consumer = replies_from_now(given.bootstrap)
    except (KafkaException, KeyError):
        print(f"no answer from Kafka at {given.bootstrap}, or it has no topic {REPLIES}; `opentinker status` shows its address", file=sys.stderr)
        return 2
    producer = Producer({"bootstrap.servers": given.bootstrap})
    for ce_id, path in zip(ids, given.manifests, strict=True):
        headers = {
            "ce_specversion": "1.0",
            "ce_id": ce_id,
            "ce_type": "io.opentinker.SubmitTrainingJob.v1",
            "ce_source": "confluent-example",
            "content-type": "application/json",
        }
        producer.produce(REQUESTS, path.read_bytes(), headers={name: text.encode() for name, text in headers.items()})
    if producer.flush(10):
        print("Kafka did not take every message within 10 s", file=sys.stderr)
        return 1

    waiting, rejected, deadline = set(ids), 0, time.monotonic() + 10
    while waiting and time.monotonic() < deadline:
        record = consumer.poll(0.5)
        if record is None or record.error():
            continue
        ce_id = (record.key() or b"").decode()
        if ce_id in waiting:
            waiting.discard(ce_id)
            answer = json.loads(record.value())
            rejected += "errors" in answer
            print(json.dumps({"ce_id": ce_id, **answer}))
    consumer.close()
    if waiting:
        print(f"no answer within 10 s for {', '.join(sorted(waiting))}; is the ingress running?", file=sys.stderr)
    return 1 if waiting or rejected else 0


def replies_from_now(bootstrap: str) -> Consumer:
    """A consumer at the end of every partition of the replies topic, ready before anything is asked."""
    settings = {"bootstrap.servers": bootstrap, "group.id": f"example-{uuid.uuid4()}", "enable.auto.commit": False}
    consumer = Consumer(settings | {"log_level": 2})  # else the library prints a line for every connection that is refused
    partitions = consumer.list_topics(REPLIES, timeout=5).topics[REPLIES].partitions
    ends = [TopicPartition(REPLIES, number, consumer.get_watermark_offsets(TopicPartition(REPLIES, number), timeout=10)[1]) for number in partitions]
    consumer.assign(ends)
    return consumer


if __name__ == "__main__":
    sys.exit(main())
