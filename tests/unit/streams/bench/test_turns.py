from __future__ import annotations

from streams.bench.turns import measure_in_turn


def test_subjects_take_turns() -> None:
    order: list[str] = []
    said: list[str] = []

    def subject(name: str) -> dict[str, float]:
        order.append(name)
        return {"place": len(order), "length": len(name)}

    measured = measure_in_turn(
        {"a": lambda: subject("a"), "bb": lambda: subject("bb")}, 2, said.append
    )
    assert order == ["a", "bb", "a", "bb"]
    assert measured == {
        "a": {"place": [1.0, 3.0], "length": [1.0, 1.0]},
        "bb": {"place": [2.0, 4.0], "length": [2.0, 2.0]},
    }
    assert said[0] == "a: repetition 1 of 2"
    assert said[-1] == "bb: repetition 2 of 2"
