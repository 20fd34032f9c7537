"""The folder of a run: its files, and whether a run may use it."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from lamb_tpu.cluster import host
from lamb_tpu.config import flatten
from lamb_tpu.data import ArraySource
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.spec import parse
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected


def test_config_comes_back(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(optimizer__rules=(("bias$", {"decay": False}), ("", {})))
    folder = Workdir(tmp_path / "new" / "run")
    folder.check(config)
    folder.write_receipt(parse(config), "table", {})
    assert folder.read_config() == flatten(config)
    folder.check(config)  # tuples are lists in JSON, but still compare equal
    assert folder.parameters.read_text() == "table"


@pytest.mark.long
def test_advice_for_a_longer_run_works(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="duration: '12 steps' there, '20 steps' now") as error:
        train(tiny.digits(duration="20 steps"), copy, quiet=True)
    output = str(error.value).partition("; to train longer")[2]
    flags = dict(flag.split("=", 1) for flag in shlex.split(output.partition(": the")[0])[-4:])
    assert flags.pop("--config.init_from") == str(copy)
    assert flags.pop("--config.duration") == "8 steps"
    assert flags == {"--config.init.optimizer_state": "keep", "--config.seed": "1"}

    longer = tiny.digits(duration="8 steps", seed=1, init_from=str(copy))
    longer.init.optimizer_state = "keep"
    train(longer, tmp_path / "longer", quiet=True)
    before, _ = tiny.restored(tiny.digits(), copy)
    state, _ = tiny.restored(longer, tmp_path / "longer")
    assert int(state.step) == 8
    counts = [int(jax.tree.leaves(x.opt_state)[0]) for x in (before, state)]
    assert counts == [12, 20]
    init = json.loads((tmp_path / "longer" / "init.json").read_text())
    assert (init["update"], init["updates_before"], init["new"]) == (12, 12, [])


def test_other_changes_get_no_advice(copy: pathlib.Path) -> None:
    for changes in (
        {"duration": "8 steps"},
        {"duration": "3 epochs"},
        {"duration": "20 steps", "batch_size": 32},
    ):
        with rejected("*") as caught:
            Workdir(copy).check(tiny.digits(**changes))
        assert caught.value.remedy == "give another folder, or the config of that run"


def test_each_start_adds_a_line(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    for name in ("first", "second"):
        folder.write_receipt(parse(tiny.digits()), "table", {"start": name})
    first, second = (json.loads(line) for line in folder.run.read_text().splitlines())
    assert (first["start"], second["start"]) == ("first", "second")
    assert first["devices"] == 8 and first["python"].startswith("3.")
    versions = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "lamb_tpu")
    assert all(first[name][0].isdigit() for name in versions)
    assert isinstance(first["command"], list) and "commit" in first
    assert first["processor"] == host.processor() and first["NPROC"] == os.environ["NPROC"]


def test_free_keys_may_differ(copy: pathlib.Path) -> None:
    folder = Workdir(copy)
    folder.check(tiny.digits(checkpoint__every="1 steps", log__every="2 steps", data__dir="x"))
    with rejected(
        f"--workdir {copy}", problem="config (duration: '12 steps' there, '13 steps' now"
    ):
        folder.check(tiny.digits(duration="13 steps"))
    with pytest.raises(UserError, match=r"config \((?:[^;]+; ){8}and \d+ more\); give another f"):
        folder.check(tiny.bert())


def test_checkpoints_of_an_unknown_run(copy: pathlib.Path) -> None:
    (copy / "config.json").unlink()
    before = tiny.fingerprint(copy)
    with rejected(f"--workdir {copy}", problem="holds checkpoints but no config.json"):
        Workdir(copy).check(tiny.digits())
    assert tiny.fingerprint(copy) == before


@pytest.mark.parametrize("content", [b"", b'{"seed": 0', b"\xff\xfe"])
def test_damaged_config(copy: pathlib.Path, content: bytes) -> None:
    (copy / "config.json").write_bytes(content)
    file, remedy = copy / "config.json", "restore it or give another --workdir"
    with rejected(file, problem="is damaged", remedy=remedy):
        Workdir(copy).check(tiny.digits())


def test_folder_without_a_run(tmp_path: pathlib.Path) -> None:
    with rejected(f"--workdir {tmp_path}", problem="holds no run: config.json is missing"):
        Workdir(tmp_path).read_config()


def test_table_must_not_change(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    folder.check_parameters("anything, for there is none yet")
    folder.write_receipt(parse(tiny.digits()), "a table", {})
    folder.check_parameters("a table")
    problem = f"differs from {folder.parameters} (the file is not a table"
    with rejected("the parameter table", problem=problem, remedy="give another --workdir"):
        folder.check_parameters("another")


def test_a_table_of_an_older_version_still_fits(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    older = "path  shape  count  decay\na     (4)        4  yes\ntotal: 1 leaf"
    now = "path  shape  count  decay  update\na     (4)        4  yes    LAMB\ntotal: 1 leaf"
    folder.write_receipt(parse(tiny.digits()), older, {})
    folder.check_parameters(now)
    with rejected(
        "the parameter table", problem="'a' has decay yes in the file and no in this run"
    ):
        folder.check_parameters(now.replace("yes", "no "))


def test_one_run_at_a_time(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    with folder.hold():
        with pytest.raises(UserError, match=f"--workdir {tmp_path} is in use by another run"):
            with Workdir(tmp_path).hold():
                raise AssertionError
        with Workdir(tmp_path).hold(enabled=False):
            pass  # the other processes of the same run
    with folder.hold():
        pass


def test_killed_run_frees_its_folder(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys, time; from lamb_tpu.store.workdir import Workdir\n"
        "with Workdir(sys.argv[1]).hold(): print('held', flush=True); time.sleep(100)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tiny.ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="in use"), Workdir(tmp_path).hold():
        pass
    holder.kill()
    holder.communicate()
    with Workdir(tmp_path).hold():
        pass


def test_home_folder_is_understood(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Workdir("~/run").path == tmp_path / "run"


def test_errors_name_the_given_key(tmp_path: pathlib.Path) -> None:
    with rejected(f"config.init_from {tmp_path}", problem="holds no run: config.json is missing"):
        Workdir(tmp_path, "config.init_from").read_config()
    with pytest.raises(UserError, match="^config.init_from s3://x/y has an unsupported URL scheme"):
        Workdir("s3://x/y", "config.init_from")


def test_has_a_checkpoint(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    assert not folder.has_checkpoint()
    (folder.checkpoints / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    (folder.checkpoints / "8").touch()
    assert not folder.has_checkpoint()
    (folder.checkpoints / "7").mkdir()
    assert folder.has_checkpoint()


def test_source_of_the_initial_weights(tmp_path: pathlib.Path) -> None:
    folder = Workdir(tmp_path)
    assert folder.read_init() is None
    record = {"init_from": "x", "update": 3, "optimizer_state": "reset", "updates_before": 0}
    folder.write_init({**record, "new": ("a",)})
    assert folder.read_init() == {**record, "new": ["a"]}
    for damaged in ([], {}, {**record, "updates_before": None}, {**record, "init_from": 3}):
        folder.init.write_text(json.dumps(damaged))
        with rejected(folder.init, problem="is damaged"):
            folder.read_init()
    folder.init.write_text("{")
    with rejected(folder.init, problem="is damaged"):
        folder.read_init()


def test_vocabulary_is_saved_and_must_not_change(tmp_path: pathlib.Path) -> None:
    def source(*words: str, cased: bool = False) -> SimpleNamespace:
        vocabulary = Vocabulary([*SPECIAL_TOKENS, *words])
        return SimpleNamespace(name="text:train", vocabulary=vocabulary, cased=cased)

    folder = Workdir(tmp_path)
    folder.check_text(source("dog", "cat"))  # there is no vocabulary yet
    folder.write_receipt(parse(tiny.digits()), "table", {}, source("dog", "cat"))
    assert (tmp_path / "vocab.txt").read_text() == "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ndog\ncat\n"
    assert json.loads((tmp_path / "text.json").read_text()) == {"cased": False}
    folder.check_text(source("dog", "cat"))
    folder.check_text(SimpleNamespace(vocabulary=None))
    for other in (source("cat", "dog"), source("dog"), source("dog", "cat", cased=True)):
        with rejected("*text:train", problem="differs from vocab.txt (cased=False) in --workdir "):
            folder.check_text(other)


def test_training_writes_the_vocabulary(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArraySource, "vocabulary", Vocabulary([*SPECIAL_TOKENS, "dog"]))
    train(tiny.digits(duration="1 steps"), tmp_path, quiet=True)
    assert (tmp_path / "vocab.txt").read_text().endswith("[MASK]\ndog\n")
    monkeypatch.setattr(ArraySource, "cased", True)
    with rejected("*", problem="vocab.txt (cased=False)", remedy="give the text with which"):
        prepare(tiny.digits(duration="1 steps"), tmp_path)


def test_no_text_no_vocabulary(trained: pathlib.Path) -> None:
    assert not (trained / "vocab.txt").exists() and not (trained / "init.json").exists()
