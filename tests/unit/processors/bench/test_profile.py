from __future__ import annotations

import gc
import time
from pathlib import Path

from processors.bench.profile import Profile, Share, by_function, by_stage, read_stacks


def test_stacks_are_summed_by_the_innermost_known_frame(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    path.write_text(
        "a:main;processors.feedback_align.machine:step;fastavro:read 1000000\n"
        "a:main;processors.feedback_align.machine:step;streams.serde.codec:decode;x:y 2000000\n"
        "a:main;processors.feedback_align.machine:step;x:y 500000\n"
        "thread asyncio_0 250000\n"
        "a:main 250000\n"
    )
    stacks = read_stacks(path)
    assert by_stage(stacks) == [
        Share("decode", 2.0, 0.5),
        Share("machine", 1.5, 0.375),
        Share("thread asyncio_0", 0.25, 0.0625),
        Share("other", 0.25, 0.0625),
    ]
    assert by_function(stacks, 1) == [Share("x:y", 2.5, 0.625)]


def test_a_replay_keeps_and_reads_within_its_own_frames(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    inside = "processors.replay.shadow:replay_partition;processors.replay.shadow:run"
    path.write_text(
        f"{inside};processors.feedback_align.agent:drain;?:x 5000000\n"
        f"{inside};processors.replay.shadow:_keep;processors.replay.store:_write 2000000\n"
        f"{inside};processors.replay.shadow:batches;processors.runtime.readback:record_of 1000000\n"
        f"{inside};importlib._bootstrap:_load_unlocked;pyarrow:<module> 1000000\n"
        f"{inside};processors.reward.agent:drain;processors.reward.signals:find 1000000\n"
    )
    assert {share.stage: share.seconds for share in by_stage(read_stacks(path))} == {
        "machine": 5.0,
        "keep state and outputs": 2.0,
        "fetch": 1.0,
        "start": 1.0,
        "score": 1.0,
    }


def spin(seconds: float) -> None:
    deadline = time.process_time() + seconds
    while time.process_time() < deadline:
        pass


def test_busy_functions_are_seen_and_waiting_is_not(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    profile = Profile(path, interval_s=0.001)
    # What other tests left would be searched for longer than anything else here takes, and the
    # sample after it, which comes late, be charged to whoever asked for it.
    gc.freeze()
    try:
        profile.start()
        spin(0.1)
        gc.collect()
        spin(0.2)
        time.sleep(0.3)
        profile.stop()
    finally:
        gc.unfreeze()
    shares = {share.stage: share.seconds for share in by_function(read_stacks(path), 1_000)}
    # Where the machine is busy, samples come late: of what is seen the busy function has most.
    busy = shares[f"{__name__}:spin"]
    waiting = f"{__name__}:test_busy_functions_are_seen_and_waiting_is_not"
    assert busy > 0.05
    assert shares.get(waiting, 0.0) < busy
    assert shares["gc:collect"] > 0
