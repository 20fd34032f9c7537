"""The command `prepare_text`: its output, exit status, and one-sentence errors."""

import pathlib

import pytest

from lamb_tpu.data import prepare_text
from lamb_tpu.data.text.preparation import Progress
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary


@pytest.fixture
def arguments(tmp_path: pathlib.Path) -> list[str]:
    Vocabulary([*SPECIAL_TOKENS, "a", "b", "."]).write(tmp_path / "vocab.txt")
    (tmp_path / "one.txt").write_bytes(b"A b.\nA \xff c.\n" + b"a b " * 1000)
    (tmp_path / "two.txt").write_bytes(b"")
    return [
        f"--input={tmp_path}/o*.txt",
        f"--input={tmp_path}/t*.txt",
        f"--output={tmp_path}/out",
        f"--vocab={tmp_path}/vocab.txt",
        "--processes=1",
    ]


def test_printed_output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_text.main(arguments) == 0
    printed = capsys.readouterr()
    output = pathlib.Path(arguments[2].removeprefix("--output="))
    assert printed.out.splitlines() == [
        f"{output} holds 1 document, 4 sentences and 2,006 tokens in 1 shard; 0.05% of the "
        "tokens are unknown",
        f"to train on it: --config.data.dir={output.parent} --config.data.train_split=out "
        "--config.model.vocab_size=8",
    ]
    assert printed.err.splitlines() == [
        "warning: 1 document(s) were empty and were left out",
        "warning: 1 line(s) were not UTF-8; their unreadable bytes were left out",
        "warning: 1 sentence(s) were too long and were cut",
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        ("--inptu=x", "unrecognized arguments: --inptu=x; see --help; did you mean --input?"),
        ("--processes=two", "argument --processes: 'two' is not a whole number; see --help"),
        ("--documents=pages", "--documents='pages' is unknown; use file, blank-lines or titles"),
        (
            "--input=0*",
            "--input='0*' matches no file; give a file, or a pattern that matches files",
        ),
        (
            "--output=gs://x",
            "--output='gs://x' is not on this machine; use a local or mounted folder",
        ),
        (
            "--output=/proc/x",
            "--output /proc/x cannot be written (No such file or directory); give another path",
        ),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare_text.main([*arguments, change]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_home_folder(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = pathlib.Path(arguments[2].removeprefix("--output=")).parent
    monkeypatch.setenv("HOME", str(home))
    paths = ["--input=~/o*.txt", "--vocab=~/vocab.txt", "--output=~/out", "--processes=1"]
    assert prepare_text.main(paths) == 0
    assert f"--config.data.dir={home} --config.data.train_split=out" in capsys.readouterr().out
    assert (home / "out" / "manifest.json").exists()


def test_help_has_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare_text.main(["--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    lines = output.replace("\\\n", "").splitlines()
    commands = [line.split()[3:] for line in lines if "prepare_text --input" in line]
    assert len(commands) == 3 and "python -m lamb_tpu.train --config" in output
    for command in commands:
        assert prepare_text._parse(command).output.startswith("DATA/")


def test_missing_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_text.main(["--input=x"]) == 2
    assert "--output; see --help" in capsys.readouterr().err


def test_control_c(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_text, "prepare_text", interrupted)
    assert prepare_text.main(arguments) == 130
    assert "start the same command again" in capsys.readouterr().err


def test_rate_and_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(prepare_text.time, "monotonic", lambda: now[0])
    with prepare_text._ProgressDisplay() as shown:
        for seconds, done in ((0, 10), (9, 12), (20, 50), (25, 90), (30, 110)):
            now[0] = 100.0 + seconds
            shown(Progress(done * 10**6, 10 * 10**6, 110 * 10**6))
    assert capsys.readouterr().out.splitlines() == [
        "10.0 MB were done by an earlier run",
        "50.0 of 110.0 MB; 2.00 MB/s, 30 s left",
        "110.0 of 110.0 MB; 3.33 MB/s, 0 s left",
    ]
