from __future__ import annotations

from pathlib import Path

import pytest

from streams.cli import main


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status, and everything that was shown."""
    try:
        status = main(["replay", *arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_help_shows_the_options_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = output_of(capsys, "--help")
    assert status == 0
    shared, _, rest = text.partition("With --into retrain")
    retrain, _, shadow = rest.partition("With --into shadow")
    assert "--into" in shared
    assert "--from" in shared
    assert "--base-version" in retrain
    assert "--warm-up" not in retrain
    assert "--warm-up" in shadow


@pytest.mark.parametrize("arguments", [("--into", "retrain"), ("--into=retrain",)])
def test_one_kind_has_its_own_help(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = output_of(capsys, *arguments, "--help")
    assert status == 0
    assert "--base-version" in text
    assert "--warm-up" not in text


def test_other_kinds_and_their_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--into", "nowhere")[0] == 2
    assert output_of(capsys, "--into")[0] == 2
    assert output_of(capsys, "--into", "retrain", "--warm-up", "1h")[0] == 2
    # Without a kind it is a shadow.
    assert output_of(capsys, "--base-version", "3")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say where to begin"),
        (("--from", "1h", "--name", "../x", "--execute"), "letters, digits, dots"),
        (("--resume", "nobody"), "there is no retrain nobody"),
        (("--from", "1h", "--base-version", "7"), "no version 7 to begin from"),
        (("--from", "yesterday"), "is no place in the log"),
    ],
)
def test_a_retrain_that_cannot_be_is_one_message(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "clawstream.yaml"
    config.write_text(f"data_dir: {tmp_path}\n", encoding="utf-8")
    monkeypatch.setenv("CLAWSTREAM_CONFIG", str(config))
    status, text = output_of(capsys, "--into", "retrain", *arguments)
    assert status == 1
    assert text.startswith("error: ")
    assert message in text
    assert not (tmp_path / "retrains").exists()
