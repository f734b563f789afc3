"""Lets subjects take turns, so that what the machine does meanwhile meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Measure = Callable[[], Mapping[str, float]]
"""Measures a subject once: one value per metric, always of the same metrics."""


def measure_in_turn(
    subjects: Mapping[str, Measure],
    repetitions: int,
    on_step: Callable[[str], None] = lambda _text: None,
) -> dict[str, dict[str, list[float]]]:
    """Measure each subject once, then each once more, and so on (A B A B).

    Args:
        subjects: By name, in the order of their turns.
        repetitions: How often each is measured; at least once.
        on_step: Told what is measured now, in words.

    Returns:
        The values of each subject by metric, one per repetition.
    """
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in subjects}
    for number in range(1, repetitions + 1):
        for name, measure in subjects.items():
            on_step(f"{name}: repetition {number} of {repetitions}")
            for metric, value in measure().items():
                measured[name].setdefault(metric, []).append(float(value))
    return measured


__all__ = ["Measure", "measure_in_turn"]
