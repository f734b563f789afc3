"""A formula's name says what equal input scores."""

from __future__ import annotations

import json

from processors.reward.formulas import FORMULA_ID
from tests.unit.processors.reward.scores import FILE, digest


def test_what_is_scored_otherwise_has_another_name() -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))
    assert {"formula_id": FORMULA_ID, "digest": digest()} == known, (
        "Equal input scores otherwise than before, or the formula has a new name. Raise FORMULA_ID "
        "if rewards of that name may be about already, then run "
        "python -m tests.unit.processors.reward.scores --write"
    )
