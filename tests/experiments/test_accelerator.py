"""The accelerator program: the prepared folder, time limits, and the result files after a kill."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from experiments.accelerator import __main__ as program
from experiments.accelerator import bert, folder, lines, running
from experiments.bench import peers
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import __main__ as reproduce
from lamb_tpu.reproduce import loading
from lamb_tpu.store import checkout
from tests.shared import shared
from tests.tiny import ROOT


@pytest.fixture
def made(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The files and folders that `prepare` makes, all empty."""
    monkeypatch.setattr(running.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    actual = tmp_path / "folder"
    for name in ("wheels", "data"):
        (actual / name).mkdir(parents=True)
    (actual / "commit.json").write_text("{}")
    return actual


def part(name: str, seconds: float, code: str, monkeypatch: pytest.MonkeyPatch) -> running.Part:
    """Returns a part that runs `code`; the first argument is the path of the results."""
    directory = pathlib.Path(os.environ["PARTS"])
    (directory / f"{name}.py").write_text(f"import pathlib, sys, time\n{code}\n")
    return running.Part(name, seconds, name, ("{out}/" + name,), ("{out}/" + name, "small"))


@pytest.fixture
def parts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the parts with three: one fails, one hangs and ignores SIGTERM, and one succeeds."""
    directory = tmp_path / "parts"
    directory.mkdir()
    monkeypatch.setenv("PARTS", str(directory))
    monkeypatch.setenv("PYTHONPATH", str(directory))
    write = "pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))"
    hang = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    monkeypatch.setattr(
        running,
        "PARTS",
        (
            part("a_fails", 200, "print('why it failed'); sys.exit(3)", monkeypatch),
            part("b_hangs", 60, f"{write}\n{hang}", monkeypatch),
            part("c_works", 200, write, monkeypatch),
        ),
    )


def report(out: pathlib.Path) -> dict[str, str]:
    actual = map(json.loads, (out / "report.jsonl").read_text().splitlines())
    return {line["part"]: line["ended"] for line in actual}


def test_no_part_stops_another(made: pathlib.Path, tmp_path: pathlib.Path, parts: None) -> None:
    began, out = time.monotonic(), tmp_path / "out"
    running.run(made, out, 5.0, small=True)
    assert time.monotonic() - began < 5.0
    ended = report(out)
    assert ended["a_fails"] == "failed with exit status 3; see log.txt"
    assert ended["b_hangs"] == "time limit" and ended["c_works"] == "complete"
    assert ended["all"] == "not complete: b_hangs"
    assert (out / "b_hangs").read_text() == "small" and "why it failed" in (
        out / "log.txt"
    ).read_text()


def test_a_kill_of_the_program_loses_no_line(
    made: pathlib.Path, tmp_path: pathlib.Path, parts: None
) -> None:
    code = (
        (
            "import pathlib; from experiments.accelerator import running; "
            f"running.PARTS = {running.PARTS!r}; Part = running.Part; "
            f"running.run(pathlib.Path({str(made)!r}), pathlib.Path({str(tmp_path / 'out')!r}), 60.0)"
        )
        .replace("(Part(", "(running.Part(")
        .replace(", Part(", ", running.Part(")
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if b"a_fails" in line and b"failed" in line:
            break
    process.kill()
    process.wait()
    assert report(tmp_path / "out")["a_fails"].startswith("failed")


def test_a_long_log_is_cut(tmp_path: pathlib.Path) -> None:
    with running._log(tmp_path, "part") as file:
        file.write(b"first" + b"x" * 3 * running._LOG_BYTES + b"last")
    text = (tmp_path / "log.txt").read_bytes()
    assert b"first" in text and b"last" in text and len(text) < running._LOG_BYTES + 100


def test_a_folder_that_is_not_complete(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="has no wheels; make the folder with: .* prepare"):
        running.run(tmp_path, tmp_path / "out", 1.0)


def test_run_starts_where_nothing_is_installed() -> None:
    code = (
        "import sys\n"
        "class Reject:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] not in sys.stdlib_module_names | {\n"
        "                'lamb_tpu', 'experiments'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Reject())\n"
        "from experiments.accelerator import __main__ as program, running\n"
        "options = program._parse(['run', 'F', '--out=O', '--minutes=0.9', '--small'])\n"
        "print(options.minutes, options.small)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["0.9", "True"], done.stderr


def test_tables_of_the_programme_can_be_run(tmp_path: pathlib.Path) -> None:
    for name in ("mnist", "cifar10"):
        (tmp_path / name).mkdir()
    tables = [part for part in running.PARTS if part.module == "lamb_tpu.reproduce"]
    assert [part.name for part in tables] == ["mnist", "cifar10_jpeg"]
    for each in tables:
        for arguments in (each.arguments, each.small):
            words = [
                word.format(data=tmp_path, out=tmp_path, work=tmp_path, seconds=9)
                for word in arguments
            ]
            reproduce.main(reproduce._parse([*words, "--dry-run"]))
    # JPEGs never count as the paper's scale.
    assert "paper" not in loading.load_all(loading.folder())["lamb/cifar10_jpeg"].scales


def test_parts_fit_into_the_time() -> None:
    total = sum(part.seconds for part in running.PARTS)
    assert total <= (1 - running._RESERVE) * 60 * running.MINUTES
    files = {"report.jsonl", "measurements.jsonl", "log.txt"} | {
        f"{part.name}.json" for part in running.PARTS if part.module == "lamb_tpu.reproduce"
    }
    assert len(files) <= 8 and len(running.PARTS) * running._LOG_BYTES < 16 * 2**20


def test_lines_are_saved_and_not_repeated(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"
    first = lines.Lines(path, "bert")
    first.add("one", ms=1.5)
    with path.open("a") as file:
        file.write('{"part": "bert", "na')  # killed while writing
    again = lines.Lines(path, "bert")
    assert again.has("one") and not again.has("two")
    assert not lines.Lines(path, "speed").has("one")


def test_a_larger_batch_follows_from_the_memory_of_others(tmp_path: pathlib.Path) -> None:
    job = bert.Ours(128, None, lines.Lines(tmp_path / "x", "bert"))
    job.needs = {64: 10_000}
    assert job.larger(30_000) == 192
    job.needs = {64: 4_000 + 6_400, 128: 4_000 + 12_800}  # 4,000 for any batch
    assert job.larger(30_000) == 256


def test_timms_lamb_in_two_versions() -> None:
    class New:
        @staticmethod
        def Lamb(params: object, lr: float, foreach: bool) -> tuple:
            return lr, foreach

    class Old:
        @staticmethod
        def Lamb(params: object, lr: float) -> float:
            return lr

    assert peers.lamb(New, [], True, lr=0.1) == (0.1, True)
    assert peers.lamb(Old, [], True, lr=0.1) == 0.1


def test_prepare_names_what_is_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*more: str) -> None:
        program.main(
            program._parse(["prepare", str(tmp_path / "f"), f"--data={tmp_path / 'data'}", *more])
        )

    with monkeypatch.context() as patched:
        patched.setattr(checkout, "_of_git", lambda: "abc+")
        with pytest.raises(UserError, match="has changed since commit abc"):
            prepare()
    monkeypatch.setattr(checkout, "_of_git", lambda: "abc")
    with pytest.raises(UserError, match="has no mnist/train-images-idx3-ubyte.gz; copy the file"):
        prepare()
    with pytest.raises(UserError, match=r"has no wheel of ml_collections==1.1.0, .* promise==2.3"):
        folder._copy_wheels(tmp_path / "w", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(
        UserError, match="cannot be downloaded .*; check the network, or give --wheel"
    ):
        folder._download(tmp_path / "w")


@pytest.mark.long
def test_data_and_text_of_a_folder(tmp_path: pathlib.Path) -> None:
    data = shared("data")
    folder._copy_data(tmp_path, data)
    folder._write_text(
        tmp_path / "bert" / "text",
        str(data / "wikitext2_valid_test" / "wiki.test.raw"),
        data / "bert_vocab" / "vocab.txt",
    )
    assert 30e6 < folder.num_bytes(tmp_path) < 35e6
    config = bert.config_of(512, 8, tmp_path, small=True)
    assert config.data.options["sequence_length"] == 512 and config.model.get("num_layers") == 2
