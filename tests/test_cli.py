"""The command line's frame: lazy imports, one table, one line for an error of the user's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from streamvid import cli
from streamvid.errors import StreamvidError


def test_help_and_import_load_no_torch() -> None:
    code = (
        "import sys, streamvid\nfrom streamvid.cli import main\ncode = main(['--help'])\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('torch', 'diffusers', 'transformers', 'av')]\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert name.split()[0] in done.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_of_the_table_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"streamvid {name}" in " ".join(shown.split())


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    message = capsys.readouterr().err
    assert "did you mean 'doctor'" in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "--nothing"], "--nothing"),
        (["generate"], "'prompt'"),
        (["generate", "a", "b"], "(b)"),
        (["generate", "a", "-n"], "-n"),
        (["generate", "a", "-n", "1.5"], "'--num-frames'"),
        (["generate", "a", "--hieght", "3"], "--height"),
        (["batch", "a.txt", "--workers", "0"], "'--workers'"),
        (["bench", "nothing"], "nothing"),
    ],
)
def test_words_that_do_not_fit_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and not shown.out
    assert said.lower() in shown.err.lower() and "--help" in shown.err


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_a_group_alone_shows_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert "Usage" in shown.out and not shown.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def _main_raising(monkeypatch: pytest.MonkeyPatch, error: Exception, words: list[str]) -> int:
    def app(args: list[str], prog_name: str, standalone_mode: bool) -> None:
        raise error

    monkeypatch.setattr(cli, "build_app", lambda words: app)
    return cli.main(words)


def test_our_error_is_one_line_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = StreamvidError("height 100\nis not allowed")
    assert _main_raising(monkeypatch, error, ["doctor"]) == 2
    assert capsys.readouterr().err == "error: height 100 is not allowed\n"
    assert _main_raising(monkeypatch, error, ["doctor", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main_raising(monkeypatch, KeyError("x"), ["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_value_errors_are_ours_only_when_we_raise_them() -> None:
    from streamvid.memory.spec import build

    with pytest.raises(ValueError) as ours:
        build("nothing", {}, "memory policy")
    assert cli.user_message(ours.value) is not None
    with pytest.raises(ValueError) as theirs:
        json.loads("{")
    assert cli.user_message(theirs.value) is None


def test_doctor_reports_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    kinds = {finding["kind"] for finding in findings}
    assert {"machine", "device", "encoder", "package"} <= kinds
    cpu = next(f for f in findings if f["kind"] == "device" and f["name"] == "cpu")
    assert cpu["usable"]
    assert all(f["detail"] for f in findings), "a finding without a reason"
