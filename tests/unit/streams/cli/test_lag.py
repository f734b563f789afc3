from __future__ import annotations

from pathlib import Path

from streams.cli.lag import _learner_positions
from streams.contracts import OffsetRange, VersionStatus
from streams.registry import RETRAIN, Registry
from streams.settings import Settings
from streams.topics import SCORED
from tests.unit.streams.registry.builders import version


def test_a_retrained_version_is_not_where_the_learner_is(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)

    def read_up_to(end: int) -> tuple[OffsetRange, ...]:
        return (OffsetRange(topic=SCORED, partition=0, start=0, end=end),)

    with Registry.open(settings.effective_registry_url) as registry:
        registry.record(version(1, source_offsets=read_up_to(90)))
        registry.record(
            version(
                2,
                source_offsets=read_up_to(40),
                status=VersionStatus.CANDIDATE,
                attributes={RETRAIN: "november"},
            )
        )
    (positions,) = _learner_positions(settings).values()
    assert positions == {(SCORED, 0): 90}
