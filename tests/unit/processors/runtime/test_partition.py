from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from processors.runtime import partition as module
from processors.runtime.partition import PartitionRunner
from processors.runtime.state import RestoredState, decode_meta
from streams import metrics as names
from streams.errors import FencedError
from tests.unit.processors.runtime.fakes import Stage, record, settle


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
async def runner(stage: Stage) -> AsyncIterator[PartitionRunner]:
    made = stage.runner()
    await made.open()
    yield made
    await made.close()


async def test_a_batch_is_one_commit_with_outputs_changes_and_offsets(
    stage: Stage, runner: PartitionRunner
) -> None:
    await runner.accept("a", [record("a", 3, b"x"), record("a", 5, b"y")])
    await settle()
    ((outputs, changes, meta),) = stage.writer.commits
    assert outputs == [b"x", b"y"]
    assert changes == {b"x": b"seen", b"y": b"seen"}
    assert decode_meta(meta) == ({"a": 5}, b"meta")
    assert runner.applied_offset("a") == 5
    assert runner.applied_offset("b") is None
    assert stage.metrics.value(names.RECORDS_IN, topic="a") == 2
    assert stage.metrics.value(names.STATE_ENTRIES, partition="0") == 1
    assert stage.metrics.value(names.STATE_BYTES, partition="0") == 7


async def test_how_late_an_output_is_counts_from_when_it_was_due(
    stage: Stage, runner: PartitionRunner
) -> None:
    await runner.accept("a", [record("a", 0), record("a", 1)])
    await settle()
    sample, name = stage.metrics.registry.get_sample_value, names.CLOSING_DELAY.name
    assert sample(f"{name}_count", {"processor": "fake"}) == 2
    assert sample(f"{name}_sum", {"processor": "fake"}) == 3.0


async def test_what_was_applied_before_a_restart_is_skipped() -> None:
    stage = Stage(state=RestoredState({b"k": b"v"}, {"a": 7}, b"m"))
    runner = stage.runner()
    await runner.open()
    await runner.accept("a", [record("a", offset) for offset in range(6, 10)])
    await runner.accept("a", [record("a", offset) for offset in range(5, 9)])
    await settle()
    assert (stage.processor.restored, stage.processor.meta) == ({b"k": b"v"}, b"m")
    assert stage.processor.fed == [("a", 8), ("a", 9)]
    await runner.close()


async def test_offsets_restored_are_kept_by_what_is_written_next() -> None:
    stage = Stage(state=RestoredState({}, {"a": 7, "b": 3}, b"m"))
    runner = stage.runner()
    await runner.open()
    runner.release()
    await settle()
    await runner.hold()
    assert stage.writer.commits == []
    runner.release()
    await runner.accept("a", [record("a", 8)])
    await settle()
    ((_, _, meta),) = stage.writer.commits
    assert decode_meta(meta)[0] == {"a": 8, "b": 3}
    assert runner.applied_offset("b") == 3
    await runner.close()


async def test_what_gathers_during_a_transaction_goes_into_the_next_one(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.writer.gate = asyncio.Event()
    for offset in range(4):
        await runner.accept("a", [record("a", offset, b"%d" % offset)])
        await settle()
    stage.writer.gate.set()
    await settle()
    assert [outputs for outputs, _, _ in stage.writer.commits] == [[b"0"], [b"1", b"2", b"3"]]


async def test_the_writer_learns_what_was_restored(stage: Stage) -> None:
    stage.state = RestoredState({b"k": b"1"}, {"a": 4}, b"m", {b"k": 3})
    runner = stage.runner()
    await runner.open()
    assert stage.writer.resumed is stage.state
    await runner.close()


async def test_an_input_offset_is_not_applied_before_its_transaction_is_committed(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.writer.gate = asyncio.Event()
    await runner.accept("a", [record("a", 0)])
    await settle()
    assert runner.applied_offset("a") is None
    stage.writer.gate.set()
    await settle()
    assert runner.applied_offset("a") == 0


async def test_offsets_without_effect_are_written_with_the_next_effect_or_on_hold(
    stage: Stage, runner: PartitionRunner
) -> None:
    await runner.accept("a", [record("a", 0, None)])
    await settle()
    assert stage.writer.commits == []
    await runner.hold()
    ((outputs, _, meta),) = stage.writer.commits
    assert (outputs, decode_meta(meta)[0]) == ([], {"a": 0})
    assert runner.applied_offset("a") == 0


async def test_of_offsets_without_effect_the_newest_are_written_and_only_once(
    stage: Stage, runner: PartitionRunner
) -> None:
    for offset in (0, 1):
        await runner.accept("a", [record("a", offset, None)])
        await settle()
    await runner.hold()
    runner.release()
    await runner.accept("a", [record("a", 2, None)])
    await settle()
    await runner.accept("a", [record("a", 3)])
    await settle()
    await runner.hold()
    assert [decode_meta(meta)[0] for _, _, meta in stage.writer.commits] == [{"a": 1}, {"a": 3}]
    assert runner.applied_offset("a") == 3


async def test_offsets_without_effect_are_written_after_a_while_even_so(
    stage: Stage, runner: PartitionRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_META_INTERVAL_S", 0.0)
    await runner.accept("a", [record("a", 0, None)])
    await settle()
    assert runner.applied_offset("a") == 0


async def test_while_held_nothing_is_written(stage: Stage, runner: PartitionRunner) -> None:
    await runner.hold()
    await runner.accept("a", [record("a", 0)])
    await settle()
    assert stage.writer.commits == []
    runner.release()
    await settle()
    assert len(stage.writer.commits) == 1


async def test_hold_waits_for_the_running_transaction(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.writer.gate = asyncio.Event()
    await runner.accept("a", [record("a", 0)])
    await settle()
    holding = asyncio.create_task(runner.hold())
    await settle()
    assert not holding.done()
    stage.writer.gate.set()
    await holding
    assert len(stage.writer.commits) == 1


async def test_a_topic_that_waits_for_the_other_is_paused_and_resumed(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.processor.wait.add("a")
    await runner.accept("a", [record("a", offset) for offset in range(5)])
    await settle()
    assert stage.flow.paused == {"a"}
    await runner.accept("b", [record("b", 0)])
    await settle()
    assert stage.processor.applied == {"b": 0}
    stage.processor.wait.clear()
    await runner.accept("b", [record("b", 1)])
    await settle()
    assert stage.flow.paused == set()
    assert runner.applied_offset("a") == 4


async def test_a_topic_flows_again_when_half_of_what_waited_is_applied(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.processor.wait.add("a")
    await runner.accept("a", [record("a", offset) for offset in range(5)])
    await settle()
    assert stage.flow.paused == {"a"}
    for left, paused in ((3, {"a"}), (2, set())):
        del stage.processor.pending[left:]
        await runner.accept("b", [record("b", 5 - left)])
        await settle()
        assert stage.flow.paused == paused


async def test_after_a_rebalance_a_topic_that_still_waits_is_paused_again(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.processor.wait.add("a")
    await runner.accept("a", [record("a", offset) for offset in range(5)])
    await settle()
    await runner.hold()
    stage.flow.paused.clear()
    runner.release()
    await settle()
    assert stage.flow.paused == {"a"}


async def test_accept_holds_the_fetcher_back_while_a_transaction_is_slow(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.writer.gate = asyncio.Event()
    await runner.accept("a", [record("a", 0)])
    await settle()
    await runner.accept("a", [record("a", offset) for offset in range(1, 21)])
    third = asyncio.create_task(runner.accept("a", [record("a", 21)]))
    await settle()
    assert not third.done()
    stage.writer.gate.set()
    await third
    await settle()
    assert runner.applied_offset("a") == 21


async def test_what_waits_to_be_accepted_is_let_go_when_the_partition_is_given_up(
    stage: Stage,
) -> None:
    runner = stage.runner()
    await runner.open()
    stage.writer.gate = asyncio.Event()
    await runner.accept("a", [record("a", 0)])
    await settle()
    await runner.accept("a", [record("a", offset) for offset in range(1, 21)])
    waiting = asyncio.create_task(runner.accept("a", [record("a", 21)]))
    await settle()
    await runner.close()
    await waiting
    assert stage.writer.closed
    assert stage.writer.commits == []
    assert runner.applied_offset("a") is None


async def test_a_fenced_writer_ends_the_worker_and_applies_nothing(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.writer.error = FencedError("taken over")
    await runner.accept("a", [record("a", 0)])
    await settle()
    assert stage.errors == [stage.writer.error]
    assert runner.applied_offset("a") is None
    await runner.accept("a", [record("a", 1)])
    await settle()
    assert stage.errors == [stage.writer.error]


async def test_a_tick_is_due_once_until_it_was_read_back(
    stage: Stage, runner: PartitionRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not runner.tick_due(0)
    stage.processor.wants_tick = True
    assert runner.tick_due(0)
    runner.tick_sent({"a": 4, "b": 2})
    assert not runner.tick_due(0)
    await runner.accept("a", [record("a", 4, None)])
    await settle()
    assert not runner.tick_due(0)
    await runner.accept("b", [record("b", 2, None)])
    await settle()
    await asyncio.sleep(0.002)
    assert runner.tick_due(0)
    runner.tick_sent({"a": 9, "b": 9})
    assert not runner.tick_due(0)
    monkeypatch.setattr(module, "TICK_TIMEOUT_S", -1.0)
    assert runner.tick_due(0)


async def test_no_tick_while_held_or_while_something_waits_to_be_fed(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.processor.wants_tick = True
    assert runner.tick_due(0)
    await runner.hold()
    assert not runner.tick_due(0)
    runner.release()
    await asyncio.sleep(0.002)
    assert runner.tick_due(0)
    stage.writer.gate = asyncio.Event()
    await runner.accept("a", [record("a", 0)])
    await settle()
    await runner.accept("a", [record("a", 1)])
    await asyncio.sleep(0.002)
    assert not runner.tick_due(0)
    stage.writer.gate.set()


async def test_right_after_a_rebalance_no_topic_counts_as_silent() -> None:
    stage = Stage()
    stage.limits = type(stage.limits)(10, 4, tick_interval_ms=60_000)
    stage.processor.wants_tick = True
    runner = stage.runner()
    await runner.open()
    assert runner.tick_due(0)
    await runner.hold()
    runner.release()
    assert not runner.tick_due(0)
    await runner.close()


async def test_no_tick_while_the_topic_waited_for_still_delivers() -> None:
    stage = Stage()
    stage.limits = type(stage.limits)(10, 4, tick_interval_ms=60_000)
    runner = stage.runner()
    await runner.open()
    stage.processor.wants_tick = True
    await runner.accept("a", [record("a", 0)])
    await runner.accept("b", [record("b", 0)])
    await settle()
    assert not runner.tick_due(0)
    await runner.close()


async def test_gauges_of_a_partition_given_up_are_gone(stage: Stage) -> None:
    runner = stage.runner()
    await runner.open()
    await runner.accept("a", [record("a", 0)])
    await settle()
    labels = {"processor": "fake", "partition": "0"}
    sample = stage.metrics.registry.get_sample_value
    assert sample(names.STATE_ENTRIES.name, labels) == 1
    await runner.close()
    assert sample(names.STATE_ENTRIES.name, labels) is None


async def give_up_holding(runner: PartitionRunner) -> None:
    """Hold, as the worker does, no longer than it may take."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await runner.hold()


async def begin_a_transaction(stage: Stage, runner: PartitionRunner) -> None:
    """Of eleven records ten are on their way."""
    stage.writer.gate = asyncio.Event()
    await runner.accept("a", [record("a", offset, b"%d" % offset) for offset in range(11)])
    while not stage.processor.applied:
        await asyncio.sleep(0)


async def test_a_hold_given_up_leaves_the_running_transaction_alone(
    stage: Stage, runner: PartitionRunner
) -> None:
    """What was computed must be written, or what comes next would be written without it."""
    await begin_a_transaction(stage, runner)
    await give_up_holding(runner)
    assert stage.writer.gate is not None
    stage.writer.gate.set()
    runner.release()
    await settle()
    assert [outputs for outputs, _, _ in stage.writer.commits] == [
        [b"%d" % offset for offset in range(10)],
        [b"10"],
    ]
    assert runner.applied_offset("a") == 10


async def test_a_hold_given_up_leaves_offsets_on_their_way_alone(
    stage: Stage, runner: PartitionRunner
) -> None:
    await runner.accept("a", [record("a", 0, None)])
    await settle()
    stage.writer.gate = asyncio.Event()
    await give_up_holding(runner)
    stage.writer.gate.set()
    await settle()
    assert len(stage.writer.commits) == 1
    assert runner.applied_offset("a") == 0


async def test_a_failure_after_a_hold_was_given_up_ends_the_worker(
    stage: Stage, runner: PartitionRunner
) -> None:
    stage.writer.error = FencedError("taken over")
    await begin_a_transaction(stage, runner)
    await give_up_holding(runner)
    assert stage.writer.gate is not None
    stage.writer.gate.set()
    await settle()
    runner.release()
    await settle()
    assert stage.errors == [stage.writer.error]
    assert stage.writer.commits == []
