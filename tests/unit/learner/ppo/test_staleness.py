from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.ppo.staleness import admission_limit, oldest_fresh


@pytest.mark.parametrize(("version", "admitted"), [(0, 12), (5, 32)])
def test_admission_matches_the_oracle(version: int, admitted: int) -> None:
    assert admission_limit(version, max_version_gap=2, batch_size=4) == admitted


@given(st.integers(0, 50), st.integers(0, 8), st.integers(1, 16))
def test_whatever_is_admitted_is_trained_within_the_gap(version: int, gap: int, batch: int) -> None:
    limit = admission_limit(version, max_version_gap=gap, batch_size=batch)
    # The last one admitted is trained on while it is fresh, one more would not be.
    assert oldest_fresh((limit - 1) // batch, max_version_gap=gap) == version
    assert oldest_fresh(limit // batch, max_version_gap=gap) > version


def test_freshness_ends_beyond_the_gap() -> None:
    assert oldest_fresh(7, max_version_gap=4) == 3
    assert oldest_fresh(7, max_version_gap=0) == 7
