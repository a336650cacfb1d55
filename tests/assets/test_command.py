from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd.assets import command
from sandboxd.errors import SetupError


def test_output_comes_back_and_input_goes_in() -> None:
    result = command.run(["sh", "-c", "cat; echo said >&2"], step="talk", stdin=bytes(range(256)) * 1000)
    assert result.stdout == bytes(range(256)) * 1000
    assert result.stderr == "said"


def test_each_line_of_progress_is_passed_on_as_it_comes() -> None:
    told: list[str] = []
    command.run(["sh", "-c", "printf 'one\\n\\377two\\nthree' >&2"], step="talk", on_line=told.append)
    assert told == ["one", "\ufffdtwo", "three"]


def test_a_failure_names_the_step_and_ends_with_what_the_program_said() -> None:
    with pytest.raises(command.BuildFailed) as failed:
        command.run(["sh", "-c", "seq 100 >&2; exit 3"], step="count")
    assert (failed.value.step, failed.value.exit_code) == ("count", 3)
    assert failed.value.tail.splitlines()[-2:] == ["99", "100"]
    assert len(failed.value.tail.splitlines()) == command.LINES_KEPT
    assert str(failed.value).startswith("could not count (exit 3): ")


def test_words_are_passed_as_they_are() -> None:
    words = ["a b", "*", "$HOME", "'", "", "-n", "\n"]
    result = command.run(["printf", "%s\\0", *words], step="print")
    assert result.stdout.decode().split("\0")[:-1] == words


def test_a_callback_that_fails_ends_the_program(tmp_path: Path) -> None:
    def refuse(line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="started"):
        command.run(
            ["sh", "-c", f"echo started >&2; sleep 2; touch {tmp_path}/late"], step="wait", on_line=refuse
        )
    assert not (tmp_path / "late").exists()


def test_of_the_environment_only_what_reaches_a_network_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/cert")
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    seen = command.run(["env"], step="look").stdout.decode().splitlines()
    assert {"PIP_CERT=/cert", "https_proxy=http://proxy.example", "LC_ALL=C.UTF-8", "TZ=UTC"} <= set(seen)
    assert not [line for line in seen if "secret" in line or line.startswith("LANG=")]


def test_missing_programs_come_as_one_command_for_root() -> None:
    with pytest.raises(SetupError) as refused:
        command.require(["sh", "mkfs.erofs.missing", "another-missing"])
    assert str(refused.value).splitlines()[-1].strip() == (
        "apt-get update && apt-get install -y --no-install-recommends another-missing mkfs.erofs.missing"
    )


def test_a_program_to_run_that_is_missing_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="not-installed-here"):
        command.run(["not-installed-here"], step="run it")
