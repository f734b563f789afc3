"""The toy's topics, workers over them, and what must come of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.conftest import create_topics
from tests.integration.harness import Bench, WorkerProcess, wait_until
from tests.integration.toy import ToyProcessor

PARTITIONS = 3
GAP_MS = 300
TOY = "tests.integration.toy"
ARRIVALS = {"message.timestamp.type": "LogAppendTime"}


class ToyBench(Bench):
    """The toy's topics, and its outputs against those of a run without any runtime."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str) -> None:
        super().__init__(bootstrap, folder)
        self.prefix = prefix
        self.inputs = (f"{prefix}.a", f"{prefix}.b")
        self._number = 0

    def start(self, name: str, instance: str | None = None) -> WorkerProcess:
        # Small limits, so that a backlog of one input runs into all of them.
        limits = {"max_batch_records": 50, "max_buffered_records": 60}
        config = self.config(name, worker={"group_instance_id": instance, **limits})
        return self.worker(TOY, self.prefix, str(GAP_MS), str(config), name=name)

    def produce(self, count: int) -> None:
        for _ in range(count):
            number = self._number = self._number + 1
            topic = self.inputs[number % 3 == 0]
            self.producer.produce(topic, key=f"k{number % 17}", value=f"v{number}")
            self.producer.poll(0)
        self.flush()

    def outputs(self) -> Counter[bytes]:
        return Counter(r.value or b"" for r in self.read(f"{self.prefix}.out", 2))

    def expected(self) -> tuple[Counter[bytes], bool]:
        """What a pure run over the log as it is now gives, and whether all is closed."""
        logs = {topic: self.read(topic, PARTITIONS) for topic in self.inputs}
        values: Counter[bytes] = Counter()
        closed = True
        for partition in range(PARTITIONS):
            processor = ToyProcessor(self.inputs, "out", GAP_MS)
            for topic, records in logs.items():
                processor.feed(topic, [r for r in records if r.partition == partition])
            outcome = processor.drain(1_000_000)
            values.update(output.value or b"" for output in outcome.outputs)
            closed = closed and not processor.keys and processor.status().tick_after_ms is None
        return values, closed

    def assert_exact(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every key is closed; then the outputs are those of the pure run.

        Args:
            meanwhile: Called each time before something is waited for.
        """

        def closed() -> bool:
            meanwhile()
            return self.expected()[1]

        def written() -> bool:
            meanwhile()
            return self.outputs().total() >= expected.total()

        wait_until(closed, "all keys closed", poll_s=0.3)
        expected = self.expected()[0]
        wait_until(written, "all outputs", poll_s=0.3)
        assert self.outputs() == expected
        assert max(expected.values()) == 1


def toy_bench(bootstrap: str, folder: Path, prefix: str) -> ToyBench:
    """A bench whose topics are there."""
    create_topics(
        bootstrap,
        {
            f"{prefix}.a": (PARTITIONS, ARRIVALS),
            f"{prefix}.b": (PARTITIONS, ARRIVALS),
            f"{prefix}.out": (2, {}),
            f"{prefix}.state": (PARTITIONS, {"cleanup.policy": "compact"}),
        },
    )
    return ToyBench(bootstrap, folder, prefix)
