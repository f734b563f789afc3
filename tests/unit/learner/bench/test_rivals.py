from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from learner.bench.rivals import Told, logits_for, pad_left, pad_right
from learner.bench.trl_env import environment
from tests.unit.learner.bench.test_course import job


def test_rows_are_filled_up_before_or_behind() -> None:
    ids, mask = pad_left([[5, 6], [7]], pad=0)
    assert ids.tolist() == [[5, 6], [0, 7]]
    assert mask.tolist() == [[1, 1], [0, 1]]
    ids, mask = pad_right([[5, 6], [7]], pad=0)
    assert ids.tolist() == [[5, 6], [7, 0]]
    assert mask.tolist() == [[1, 1], [1, 0]]


def test_made_up_logits_give_the_log_probabilities_they_were_made_for() -> None:
    replies, _ = pad_right([[3, 9, 0], [4]], pad=0)
    given = [[-0.5, -7.0, -1e-3], [-2.0]]
    found = torch.log_softmax(logits_for(replies, given, 10), dim=2)
    for row, values in enumerate(given):
        own = [float(found[row, n, replies[row, n]]) for n in range(len(values))]
        assert own == pytest.approx(values, abs=1e-5)


def test_a_certain_token_has_no_infinite_logit() -> None:
    logits = logits_for(torch.tensor([[3]]), [[0.0]], 10)
    assert torch.isfinite(logits).all()


def test_the_reward_of_a_round_is_the_mean_of_its_replies() -> None:
    assert Told([], [1.0, 1.0, 1.0, -1.0]).reward == 0.5


IMPORTED_BY_OURS = """
import builtins
from importlib.metadata import packages_distributions
wanted = set()
plain = builtins.__import__

def noting(name, globals=None, *rest, **named):
    importer = (globals or {}).get("__name__", "").partition(".")[0]
    if importer in ("learner", "streams"):
        wanted.add(name.partition(".")[0])
    return plain(name, globals, *rest, **named)

builtins.__import__ = noting
import learner.bench.rivals, learner.bench.rollouts, learner.bench.worker
import learner.bench.speed_worker, learner.adapters
known = packages_distributions()
print(*{dist for name in wanted for dist in known.get(name, ())})
"""


@pytest.mark.parametrize("subject", ["trl_ppo", "trl_grpo"])
def test_what_rivals_import_of_ours_needs_only_what_the_lock_holds(subject: str) -> None:
    code = [sys.executable, "-c", IMPORTED_BY_OURS]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    text = environment(subject, job().data).lock.read_text(encoding="utf-8")
    locked = re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    needed = {name.lower().replace("_", "-") for name in done.stdout.split()}
    assert {"msgspec", "torch", "transformers"} <= needed
    assert needed - set(locked) <= {"clawstream"}
