from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BUSY_S = 60

SCRIPT = """
import logging, sys, threading, time
from pathlib import Path
from processors.feedback_align.app import build_spec
from processors.runtime import process
from processors.runtime.topics import Cluster
from streams.metrics import ProcessorMetrics
from streams.settings import KafkaSettings, Settings

def stopped(worker):
    # As when SIGTERM comes while a record is read back from a broker that is away.
    batches._threads[0].submit(time.sleep, float(sys.argv[2]))
    worker._limit.start()
    raise SystemExit(0)

logging.basicConfig()
process.STOP_LIMIT_S = float(sys.argv[1])
process.BoundedWorker.execute_from_commandline = stopped
kafka = KafkaSettings(bootstrap_servers="127.0.0.1:9")
settings = Settings(data_dir=Path(sys.argv[3]), kafka=kafka)
metrics = ProcessorMetrics("feedback_align")
batches = process._new_worker(build_spec(settings, metrics), settings, Cluster(1, {}), metrics)
batches._announced = sys.argv[4] == "took part"
raise SystemExit(process._execute(batches))
"""


def run(
    tmp_path: Path, limit_s: float, busy_s: float, *, took_part: bool = True
) -> subprocess.CompletedProcess[str]:
    values = (str(limit_s), str(busy_s), str(tmp_path), "took part" if took_part else "joins")
    command = [sys.executable, "-c", SCRIPT, *values]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_a_processor_at_work_cannot_keep_a_worker_from_its_end(tmp_path: Path) -> None:
    ended = run(tmp_path, 0.5, BUSY_S)
    assert ended.returncode == 1, ended.stderr
    assert "stopping took more than" in ended.stderr


def test_the_end_of_one_that_had_nothing_yet_is_no_failure(tmp_path: Path) -> None:
    ended = run(tmp_path, 0.5, BUSY_S, took_part=False)
    assert ended.returncode == 0, ended.stderr
    assert "stopping took more than" in ended.stderr


def test_a_processor_may_finish_what_it_is_at(tmp_path: Path) -> None:
    ended = run(tmp_path, BUSY_S, 0.5)
    assert (ended.returncode, "stopping took" in ended.stderr) == (0, False), ended.stderr
