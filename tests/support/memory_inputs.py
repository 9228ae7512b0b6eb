"""The scheduler's input topics as lists, for tests of what they and the journal say together."""

from __future__ import annotations

from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import INPUT_TOPICS

__all__ = ["MemoryInputs"]


class MemoryInputs:
    """Input topics as a list per topic; `first` cuts the beginning off."""

    def __init__(self) -> None:
        self.records: dict[str, list[InputRecord]] = {topic: [] for topic in INPUT_TOPICS}
        self.first: dict[str, int] = dict.fromkeys(INPUT_TOPICS, 0)
        self.group: dict[str, int | None] = {}

    def append(self, topic: str, value: bytes) -> InputRecord:
        record = InputRecord(
            topic=topic, partition=0, offset=len(self.records[topic]), append_time_ms=1000 + len(self.records[topic]), key=None, value=value, headers=()
        )  # fmt: skip
        self.records[topic].append(record)
        return record

    async def bounds(self, topic: str) -> tuple[int, int]:
        return self.first[topic], len(self.records[topic])

    async def read(self, topic: str, start: int, end: int) -> list[InputRecord]:
        return [record for record in self.records[topic][start:end] if record.offset >= self.first[topic]]

    async def committed(self, topic: str) -> int | None:
        return self.group.get(topic)
