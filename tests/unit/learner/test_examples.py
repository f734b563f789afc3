from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.examples import Example, read_examples
from streams.errors import LearnerError, TrainingFileError

ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
MESSAGES = (("system", "Be kind."), ("user", "Hi"))


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "examples.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_preferences_and_demonstrations_share_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"messages": ASKED, "chosen": "Hello! \u2028", "rejected": "What?"},
        "  ",
        {"id": "x", "messages": ASKED, "reply": "Hello!"},
        "",
    )
    file = read_examples(path)
    assert file.examples == (
        Example(line=1, messages=MESSAGES, chosen="Hello! \u2028", rejected="What?"),
        Example(line=3, messages=MESSAGES, chosen="Hello!"),
    )
    assert (file.preferences, file.demonstrations) == (1, 1)
    assert file.name == "examples.jsonl"
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_raw_line_separator_in_a_text_parts_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    line = {"messages": ASKED, "reply": "a\u2028b\u0085c"}
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(line, ensure_ascii=False).encode() + b"\r\n")
    (example,) = read_examples(path).examples
    assert example.chosen == "a\u2028b\u0085c"


GOOD: dict[str, Any] = {"messages": ASKED, "reply": "Hello!"}
PAIR: dict[str, Any] = {"messages": ASKED, "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON object"),
        ("[" * 100_000, "line 2 is no JSON object"),
        ("[1]", "line 2: it is no JSON object"),
        ({**GOOD, "replyy": "x"}, "line 2: the key 'replyy' is not known; known are chosen"),
        ({"messages": ASKED}, "line 2: an example has either"),
        ({**GOOD, "chosen": "a", "rejected": "b"}, "line 2: an example has either"),
        ({"messages": ASKED, "chosen": "a"}, "line 2: an example has either"),
        ({**PAIR, "rejected": "a"}, "line 2: 'chosen' and 'rejected' are the same"),
        ({**PAIR, "rejected": 3}, "line 2: 'rejected' must be a text"),
        ({**GOOD, "reply": " "}, "line 2: 'reply' must be a text that is not empty"),
        ({"reply": "a"}, "line 2: 'messages' must be a list"),
        ({**GOOD, "messages": []}, "line 2: 'messages' must be a list"),
        ({**GOOD, "messages": [{"role": "user"}]}, "line 2: message 0 must have"),
        (
            {**GOOD, "messages": [*ASKED, {"role": "bot", "content": "x"}]},
            "line 2: message 2 has a role that is none of system, user, assistant, tool",
        ),
        (
            {**GOOD, "messages": [{"role": "user", "content": None}]},
            "line 2: the content of message 0 must be a text",
        ),
        (
            {**GOOD, "messages": [*ASKED, {"role": "assistant", "content": "x"}]},
            "line 2: the last message is of 'assistant'",
        ),
        ({**GOOD, "reply": "a\ud83d"}, r"line 2: 'reply' has '\ud83d', half of a surrogate pair"),
        ({**PAIR, "rejected": "\udc00"}, r"line 2: 'rejected' has '\udc00', half of a"),
        (
            {**GOOD, "messages": [{"role": "user", "content": "x\udfff"}]},
            r"line 2: the content of message 0 has '\udfff', half of a surrogate pair",
        ),
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(
    line: Any, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(TrainingFileError) as caught:
        read_examples(path)
    assert str(caught.value).startswith(f"{path} {message}")
    assert isinstance(caught.value, LearnerError)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"reply": "\xe9"}')
    with pytest.raises(TrainingFileError, match=r"latin\.jsonl line 2 is not UTF-8"):
        read_examples(path)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingFileError, match=r"cannot read .*No such file"):
        read_examples(tmp_path / "none.jsonl")
    with pytest.raises(TrainingFileError, match="holds no examples"):
        read_examples(write(tmp_path, "", " "))


@given(data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_lead_to_another_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(data)
    with pytest.raises(TrainingFileError):
        read_examples(path)
