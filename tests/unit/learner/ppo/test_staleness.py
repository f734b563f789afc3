from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.ppo.staleness import admission_limit, is_fresh


@pytest.mark.parametrize(("version", "admitted"), [(0, 12), (5, 32)])
def test_admission_matches_the_oracle(version: int, admitted: int) -> None:
    assert admission_limit(version, max_version_gap=2, batch_size=4) == admitted


@given(st.integers(0, 50), st.integers(0, 8), st.integers(1, 16))
def test_whatever_is_admitted_is_trained_within_the_gap(version: int, gap: int, batch: int) -> None:
    last = admission_limit(version, max_version_gap=gap, batch_size=batch) - 1
    trained_at = last // batch
    assert is_fresh(version, trained_at, max_version_gap=gap)


def test_freshness_ends_beyond_the_gap() -> None:
    assert is_fresh(3, 7, max_version_gap=4)
    assert not is_fresh(2, 7, max_version_gap=4)
