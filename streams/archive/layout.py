"""Names of an archive's files, as Kafka Connect's S3 sink lays them out. Pure.

``topics/<topic>/partition=<n>/<topic>+<n>+<start offset, 10 digits>.parquet``
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

FOLDER = "topics"

_NAME = re.compile(
    r"topics/(?P<topic>[^/]+)/partition=(?P<partition>\d+)/"
    r"(?P=topic)\+(?P=partition)\+(?P<start>\d{10,})\.parquet"
)


@dataclass(frozen=True, slots=True, order=True)
class FileName:
    """What a file's name says: records of one partition from an offset on."""

    topic: str
    partition: int
    start: int

    def __str__(self) -> str:
        folder = f"{FOLDER}/{self.topic}/partition={self.partition}"
        return f"{folder}/{self.topic}+{self.partition}+{self.start:010d}.parquet"

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """What a path within an archive names; None if it is no file of an archive."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(match["topic"], int(match["partition"]), int(match["start"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A file of an archive and its size."""

    name: FileName
    size_bytes: int


def of_topic(files: Iterable[Stored], topic: str) -> dict[int, list[Stored]]:
    """A topic's files by partition, in the order of their offsets."""
    found: dict[int, list[Stored]] = {}
    for file in sorted(files, key=lambda file: file.name):
        if file.name.topic == topic:
            found.setdefault(file.name.partition, []).append(file)
    return found


__all__ = ["FOLDER", "FileName", "Stored", "of_topic"]
