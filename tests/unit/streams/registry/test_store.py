from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.orm import Session

from streams.contracts import VersionStatus
from streams.errors import RegistryError
from streams.registry import RETRAIN, AliasMove, Registry, SegmentUse, StatusChange
from streams.registry.models import Base, VersionRow
from tests.unit.streams.registry.builders import FULL, checkpoint, version

LINEAGE = (SegmentUse(segment_id="a", revision=0), SegmentUse(segment_id="b", revision=3))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/deep/registry.db"


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with Registry.open(url) as opened:
        yield opened


def test_a_version_comes_back_as_it_was_recorded(registry: Registry, url: str) -> None:
    assert registry.record(FULL, lineage=LINEAGE, checkpoint=checkpoint(1)) == FULL
    with Registry.open(url) as again:
        assert again.get("default", 1) == FULL
        assert again.versions() == (FULL,)
        assert again.unpublished() == (FULL,)
        assert again.lineage("default", 1) == LINEAGE
        assert again.latest_checkpoint("default") == checkpoint(1)
        assert again.live("default") == 1
        assert again.next_version("default") == 2


def test_an_empty_registry_knows_nothing(registry: Registry) -> None:
    assert registry.versions() == ()
    assert registry.get("default", 1) is None
    assert registry.live("default") is None
    assert registry.next_version("default") == 1
    assert registry.newest_good("default") is None
    assert registry.latest_checkpoint("default") is None
    assert registry.unpublished() == ()
    assert registry.versions_using("default", ["a"]) == {}


def test_going_live_moves_the_alias_and_retires_the_one_before(registry: Registry) -> None:
    registry.record(version(1))
    second = registry.record(version(2, parent=1, event_time=FULL.event_time + 5))
    assert second.previous_live == 1
    first = registry.get("default", 1)
    assert first is not None
    assert (first.status, first.reason) == (VersionStatus.RETIRED, "version 2 went live")
    assert first.gate == FULL.gate
    assert registry.live("default") == 2
    assert registry.alias_moves("default") == (
        AliasMove(
            alias="live",
            from_version=None,
            to_version=1,
            moved_at=FULL.event_time,
            reason=FULL.reason,
        ),
        AliasMove(
            alias="live",
            from_version=1,
            to_version=2,
            moved_at=FULL.event_time + 5,
            reason=FULL.reason,
        ),
    )


@pytest.mark.parametrize("status", [VersionStatus.CANDIDATE, VersionStatus.REJECTED])
def test_any_other_status_leaves_the_alias(status: VersionStatus, registry: Registry) -> None:
    registry.record(version(1))
    recorded = registry.record(version(2, status=status))
    assert recorded.previous_live == 1
    assert registry.live("default") == 1
    assert len(registry.alias_moves("default")) == 1
    assert registry.history("default", 1)[-1].status is VersionStatus.LIVE


def test_the_newest_good_version_was_not_rejected(registry: Registry) -> None:
    registry.record(version(1))
    registry.record(version(2, status=VersionStatus.CANDIDATE))
    registry.record(version(3, status=VersionStatus.REJECTED))
    assert registry.newest_good("default") == 2


def test_a_retrained_version_is_beside_the_learners_line(registry: Registry) -> None:
    registry.record(version(1), lineage=LINEAGE)
    beside = version(2, status=VersionStatus.CANDIDATE, attributes={RETRAIN: "november"})
    registry.record(beside, lineage=LINEAGE)
    assert registry.newest_good("default") == 1
    assert registry.versions_using("default", ["a"]) == {"a": frozenset({1})}
    assert registry.lineage("default", 2) == LINEAGE
    assert registry.next_version("default") == 3


def test_history_and_outbox_tell_what_was_announced(registry: Registry) -> None:
    registry.record(version(1))
    registry.record(version(2))
    registry.mark_published("default-1", 77)
    registry.mark_published("default-1", 99)
    assert [v.event_id for v in registry.unpublished()] == ["default-2"]
    assert registry.history("default", 1) == (
        StatusChange(
            version=1,
            status=VersionStatus.LIVE,
            changed_at=FULL.event_time,
            reason=FULL.reason,
            event_id="default-1",
            published_at=77,
        ),
        StatusChange(
            version=1,
            status=VersionStatus.RETIRED,
            changed_at=FULL.event_time,
            reason="version 2 went live",
            event_id=None,
            published_at=None,
        ),
    )


def test_an_event_stays_the_same_after_its_version_moved_on(registry: Registry) -> None:
    first = registry.record(version(1))
    second = registry.record(version(2))
    assert registry.unpublished() == (first, second)


def test_an_unknown_event_cannot_be_marked(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="no event nowhere"):
        registry.mark_published("nowhere", 1)


@pytest.mark.parametrize("number", [1, 3])
def test_only_the_next_number_is_taken(number: int, registry: Registry) -> None:
    registry.record(version(1))
    with pytest.raises(RegistryError, match="the next number is 2"):
        registry.record(version(number, event_id="other"), checkpoint=checkpoint(number))
    assert [v.version for v in registry.versions()] == [1]
    assert registry.latest_checkpoint("default") is None


def test_a_failed_record_leaves_nothing(registry: Registry) -> None:
    twice = (LINEAGE[0], LINEAGE[0])
    with pytest.raises(RegistryError, match="Another learner of this policy"):
        registry.record(FULL, lineage=twice, checkpoint=checkpoint(1))
    assert registry.versions() == ()
    assert registry.live("default") is None
    assert registry.next_version("default") == 1


def test_a_number_that_json_cannot_hold_is_refused(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="JSON compliant"):
        registry.record(msgspec.structs.replace(FULL, metrics={"loss": float("nan")}))


def test_a_version_cannot_be_changed(registry: Registry) -> None:
    registry.record(FULL)
    with Session(registry._engine) as session:
        row = session.get_one(VersionRow, ("default", 1))
        row.optimizer_step = 9
        with pytest.raises(RegistryError, match="fixed once written"):
            session.flush()


def test_policies_have_their_own_numbers_and_aliases(registry: Registry) -> None:
    registry.record(version(1))
    registry.record(version(1, policy="npc"))
    registry.record(version(2, policy="npc", status=VersionStatus.REJECTED))
    assert (registry.live("default"), registry.live("npc")) == (1, 1)
    assert registry.next_version("npc") == 3
    assert [(v.policy, v.version) for v in registry.versions()] == [
        ("default", 1),
        ("npc", 1),
        ("npc", 2),
    ]
    assert [v.version for v in registry.versions("npc")] == [1, 2]
    assert len(registry.unpublished("npc")) == 2


def test_users_of_segments_are_found_among_the_versions_of_one_policy(registry: Registry) -> None:
    registry.record(version(1), lineage=LINEAGE)
    registry.record(version(2), lineage=LINEAGE[:1])
    registry.record(version(1, policy="npc"), lineage=LINEAGE)
    many = ["a", "b", *(f"x{n}" for n in range(1_200))]
    assert registry.versions_using("default", many) == {
        "a": frozenset({1, 2}),
        "b": frozenset({1}),
    }


def test_only_checkpoints_are_pruned(registry: Registry) -> None:
    for number in (1, 2, 3):
        registry.record(version(number), checkpoint=checkpoint(number))
    assert set(registry.prune_checkpoints("default", 1)) == {
        "file:///artifacts/default/learner-v1",
        "file:///artifacts/default/learner-v2",
    }
    assert registry.prune_checkpoints("default", 1) == ()
    assert registry.latest_checkpoint("default") == checkpoint(3)
    assert len(registry.versions()) == 3
    assert registry.artifact_uris("default") == {
        "file:///artifacts/default/policy-v1",
        "file:///artifacts/default/learner-v3",
    }


def test_a_state_that_a_kept_checkpoint_shares_stays(registry: Registry) -> None:
    registry.record(version(1), checkpoint=checkpoint(1))
    shared = replace(checkpoint(2), state_uri=checkpoint(1).state_uri)
    registry.record(version(2), checkpoint=shared)
    assert registry.prune_checkpoints("default", 1) == ()


def test_the_migrations_make_the_tables_that_the_code_uses(registry: Registry) -> None:
    with registry._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_sqlite_is_safe_for_several_processes(registry: Registry) -> None:
    with registry._engine.connect() as connection:

        def pragma(name: str) -> object:
            return connection.exec_driver_sql(f"PRAGMA {name}").scalar()

        assert pragma("journal_mode") == "wal"
        assert pragma("foreign_keys") == 1
        assert pragma("synchronous") == 2
        assert pragma("busy_timeout") == 30_000


def test_processes_that_start_together_share_one_registry(url: str) -> None:
    program = (
        "import sys; from streams.registry import Registry; sys.stdin.readline();"
        "registry = Registry.open(sys.argv[1]); print(registry.next_version('default'))"
    )
    with ExitStack() as running:
        workers = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, url],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(4)
        ]
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            out, err = worker.communicate(timeout=240)
            assert (out, worker.returncode) == ("1\n", 0), err


def test_learners_of_several_policies_write_side_by_side(registry: Registry) -> None:
    failures: list[BaseException] = []

    def learn(policy: str) -> None:
        try:
            for number in range(1, 11):
                registry.record(version(number, policy=policy), lineage=LINEAGE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=learn, args=(f"p{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(registry.versions()) == 40


def test_of_two_learners_of_one_policy_one_is_told(registry: Registry) -> None:
    barrier = threading.Barrier(2)
    told: list[str] = []

    def learn(name: str) -> None:
        barrier.wait()
        try:
            registry.record(version(1, event_id=name))
        except RegistryError as error:
            told.append(str(error))

    threads = [threading.Thread(target=learn, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(told) == 1
    assert "Another learner" in told[0]
    assert len(registry.versions()) == 1


def test_a_registry_of_a_newer_version_is_refused(registry: Registry, url: str) -> None:
    registry.close()
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    with pytest.raises(RegistryError, match="upgrade this one"):
        Registry.open(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_text("something else, and more than a header" * 50)
    with pytest.raises(RegistryError, match=r"not a database.*REGISTRY_URL"):
        Registry.open(f"sqlite:///{tmp_path}/registry.db")


@pytest.mark.parametrize(
    "bad",
    [
        "nonsense with hunter2",
        "nosuchdatabase://user:hunter2@host/name",
        "postgresql+nosuchdriver://user:hunter2@host/name",
        "postgresql+nosuchdriver://host/name?password=hunter2",
        "sqlite:////proc/nowhere/hunter.db",
    ],
)
def test_a_bad_address_is_explained_without_its_password(bad: str) -> None:
    with pytest.raises(RegistryError) as caught:
        Registry.open(bad)
    assert "hunter2" not in str(caught.value)
    assert "registry" in str(caught.value)
    assert caught.value.__cause__ is None


def test_postgresql_gets_the_same_tables(capsys: pytest.CaptureFixture[str]) -> None:
    from alembic import command

    from streams.registry.database import offline_config

    command.upgrade(offline_config("postgresql"), "head", sql=True)
    script = capsys.readouterr().out
    assert all(f"CREATE TABLE {name} (" in script for name in Base.metadata.tables)
    assert "id BIGSERIAL NOT NULL" in script
    assert "rng BYTEA NOT NULL" in script
