"""Launches of a table's cells on a slice: batches are checked, and stages start from previous stages."""

import pathlib
import shlex

import pytest

from lamb_tpu.cost.topology import topology
from lamb_tpu.errors import UserError
from lamb_tpu.launch import __main__ as launch
from lamb_tpu.launch.generations import GENERATIONS
from lamb_tpu.reproduce import jobs, launches
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.loading import folder, load_all
from tests.raising import rejected
from tests.reproduce.papers import TABLE, write

ALL = load_all(folder())


def lines(key: str, cells: str, name: str, data: str | None = None) -> list[str]:
    table = ALL[key]
    return launches.lines(
        table, table.scales["paper"], [table.cells[cell] for cell in cells.split(",")], data, name
    )


def words(line: str) -> list[str]:
    """Returns the words of a printed launch, with the variables set."""
    for name in ("BUCKET", "ZONE", "PROJECT"):
        line = line.replace(f'"${{{name}}}"', {"ZONE": "us-east5-a"}.get(name, name.lower()))
    return shlex.split(line)


def test_a_chain_of_stages_on_a_pod() -> None:
    actual = lines("lamb/table1", "lamb-32k", "v3-1024")
    one, two = [words(line) for line in actual if line.startswith("python")]
    assert " ".join([*one[:6], *one[7:]]) == (
        "python -m lamb_tpu.launch queued-resource --topology=v3-1024 "
        "--name=lamb-table1-lamb-32k-1 --data=gs://bucket/data/text -- "
        "--config=bert_pretrain:size=large,batch=32768 --config.seed=0 --config.data.dir=data "
        "--workdir=gs://bucket/runs/lamb/table1/lamb-32k/stage_1"
    )
    # The fine-tuning batch of 64 is not divisible by 1,024 devices.
    assert two[4:6] == ["--topology=v3-64", "--name=lamb-table1-lamb-32k-2"]
    assert "--config.init_from=gs://bucket/runs/lamb/table1/lamb-32k/stage_1" in two
    assert "--data=gs://bucket/data/squad" in two and "--config.data.dir=data" in two
    text = "\n".join(actual)
    assert (
        "# lamb-32k, stage 1 of 2: v3-1024 has 1,024 devices in 128 processes; in phase_1 a batch "
        "of 32,768 is 32 per device and 256 per process; in phase_2 a batch of 32,768 is 32 per "
        "device and 256 per process\n"
    ) in text
    assert "#   v3-64 is the largest slice up to v3-1024 for a batch of 64\n" in text
    assert "gs://BUCKET/data must contain a copy of ./data:\n#   text: " in text
    assert ': "${BUCKET:?set BUCKET to ' in text and "PROJECT" not in text


@pytest.mark.parametrize("name", ["v3-32", "v4-32", "v5e-32", "v5p-32", "v6e-32", "tpu7x-32"])
def test_the_launcher_takes_each_launch(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pathlib.Path(__file__).resolve().parents[2])
    actual = lines("lamb/table3", "lamb-16384", name, "gs://mine/sets")
    (line,) = [line for line in actual if line.startswith("python")]
    given = words(line)
    kind = given[3]
    assert kind == (
        "compute" if GENERATIONS[name.partition("-")[0]].image_family else "queued-resource"
    )
    assert launch.main(given[3:]) == 0
    out = capsys.readouterr().out
    assert "gs://mine/sets/imagenet" in out and "--config.data.prepared_dir=data" in out


def test_a_batch_that_does_not_divide_is_one_sentence() -> None:
    sentence = (
        "lamb/table1: cell lamb-512 does not run on --topology=v3-1024: config.phases.phase_1: "
        "config.batch_size=512 is not divisible by the 1024 devices of config.mesh; "
        "use 1024"
    )
    with pytest.raises(UserError) as error:
        lines("lamb/table1", "lamb-512", "v3-1024")
    assert str(error.value) == sentence
    # Other cells are still launched.
    actual = lines("lamb/table1", "lamb-512,lamb-1k", "v3-1024")
    assert f"# {sentence}" in actual and sum(line.startswith("python") for line in actual) == 2
    # Microbatches and groups of BatchNorm are checked too.
    with pytest.raises(UserError, match="8 devices .* times config.accumulation_steps=100; use"):
        lines("limit/cifar10", "lamb-50000", "v2-8")
    with rejected("--topology", "2xv5e-256", "names several slices", "v5e-256"):
        lines("lamb/table1", "lamb-512", "2xv5e-256")


def test_files_of_several_sets_are_copied_together() -> None:
    table = ALL["bert/end_to_end"]
    actual = launches.lines(table, table.scales["small"], [table.cells["random"]], None, "v3-32")
    (line,) = [line for line in actual if line.startswith("python")]
    given = words(line)
    assert "--data=gs://bucket/data" in given and "--config.data.dir=data/squad" in given
    assert "--config.data.options.vocab=data/text_8192/train/vocab.txt" in given


def test_machines_have_names_that_google_takes(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace('name = "lamb"', f'name = "9_a.{"x" * 80}"')
    table = write(tmp_path, text)
    job = Job(table, table.scales["small"], next(iter(table.cells.values())), 0)
    actual = launches.lines(table, job.scale, [job.cell], None, "v3-8")
    assert any(f"--name=small-digits-9-a-{'x' * 46} " in line for line in actual)
    (stage,) = jobs.stages(job)
    assert launches._largest(stage.config(), topology("v3-2048")).name == "v3-128"
