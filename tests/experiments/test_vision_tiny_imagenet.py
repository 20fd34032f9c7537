"""The study on Tiny ImageNet: its pictures, its recipes, which runs count, and the page."""

import io
import json
import pathlib
import re
import tarfile

import jax
import pytest

from experiments import records as records_lib
from experiments.vision import tiny_imagenet, tiny_imagenet_page
from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from tests.data.images.pictures import encode, smooth
from tests.shared import shared

SIZE = (256, 72, "imagenet")


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    """An archive of one picture a split, listed once a class."""
    folder = tmp_path / "source"
    folder.mkdir()
    content = encode(smooth(64, 64))
    lines = ["file\tsplit\tlabel"]
    with tarfile.open(folder / tiny_imagenet.ARCHIVE, "w:xz") as archive:
        for split in ("train", "validation"):
            info = tarfile.TarInfo(f"{split}/a.JPEG")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
            lines += [f"{split}/a.JPEG\t{split}\t{label}" for label in range(20)]
    (folder / "labels.tsv").write_text("\n".join(lines))
    return folder


def test_both_optimizers_have_one_recipe(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pictures = tmp_path / "pictures"
    tiny_imagenet.unpack(source, pictures)
    runs = [
        prepare(tiny_imagenet.make_config(cell, str(pictures)), None, jax.devices()[:1])
        for cell in tiny_imagenet.cells({"lamb": 0.02, "momentum": 0.1}, 64, *SIZE, [1])
    ]
    differ = {
        key
        for section in ("task", "model", "schedule", "data", "eval")
        for key in runs[0].config[section]
        if runs[0].config[section][key] != runs[1].config[section][key]
    }
    assert not differ
    for run, name, rate in zip(runs, ("lamb", "nesterov"), (0.02, 0.1)):
        assert run.config.optimizer.name == name and run.recipe.peak_learning_rate == rate
        # 20 examples, 64 times.
        assert (run.recipe.total_steps, run.config.seed) == (5, 1)
        assert run.config.model.name == "resnet18" and run.eval_set.num_classes == 20
        assert (len(run.train_set), run.config.data.eval_split) == (20, "validation")


def test_unpacking(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "runs" / "pictures"
    tiny_imagenet.unpack(source, target)
    assert (target / "train" / "a.JPEG").read_bytes() == encode(smooth(64, 64))
    tiny_imagenet.unpack(tmp_path / "nowhere", target)  # it is there
    whole = (source / tiny_imagenet.ARCHIVE).read_bytes()
    (source / tiny_imagenet.ARCHIVE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="tiny_imagenet20.tar.xz cannot be unpacked"):
        tiny_imagenet.unpack(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (source / "labels.tsv").unlink()
    with pytest.raises(UserError, match="--data_dir .*source has no labels.tsv"):
        tiny_imagenet.unpack(source, tmp_path / "other")


def test_the_real_list() -> None:
    folder = shared("data", "tiny_imagenet20")
    for split, length in (("train", 10_000), ("validation", 1_000)):
        found = data.load("image_folder", split, source_dir=str(folder), options={"size": 8})
        assert (len(found), found.num_classes) == (length, tiny_imagenet.NUM_CLASSES)


def write_run(folder: pathlib.Path, accuracy: float, epochs: int) -> None:
    folder.mkdir(parents=True)
    lines = [{"step": 40 * epochs, "kind": "train", "loss": 2.0, "seconds": 120.0}]
    lines += [
        {"step": 40 * epoch, "kind": "eval", "epoch": float(epoch), "accuracy": accuracy,
         "top5_accuracy": 0.8, "loss": 1.5}
        for epoch in range(1, epochs + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    receipt = {"device": "cpu", "devices": 1, "cores": 2, "jax": "0.10", "commit": "abc"}
    (folder / "run.jsonl").write_text(json.dumps(receipt) + "\n")


def test_page_of_the_complete_runs(tmp_path: pathlib.Path) -> None:
    tuning = tiny_imagenet.tuning_cells(2, *SIZE)
    assert len({cell.name for cell in tuning}) == 7
    for cell in tuning:
        write_run(tmp_path / cell.name, 0.2 + (cell.rate in (0.02, 0.1)) / 10, 2)
    tuned = tiny_imagenet.collect(tmp_path, tuning)
    rates = records_lib.best_rates(tuned, tuning, lambda r: -r["accuracy"])
    assert rates == {"lamb": 0.02, "momentum": 0.1}
    wanted = tiny_imagenet.cells(rates, 10, *SIZE, [0, 1])
    for cell, accuracy in zip(wanted, (0.5, 0.52, 0.53, 0.51), strict=True):
        write_run(tmp_path / cell.name, accuracy, 10)
    unfinished = wanted[0]._replace(seed=2)
    write_run(tmp_path / unfinished.name, 0.9, 9)
    records = tiny_imagenet.collect(tmp_path, [*wanted, unfinished])
    assert len(records) == 4
    text = tiny_imagenet_page.page(records, tuned, tiny_imagenet.GRIDS)
    lamb = "| LAMB | 0.02 | 0.5150 | 0.5000 to 0.5300 | 0: 0.5000, 1: 0.5300 | 2.0 | 1 x cpu, 2 cor"
    assert lamb in text
    assert "| SGD with Nesterov's momentum | 0.1 | 0.5150 | 0.5100 to 0.5200 |" in text
    assert "| LAMB | 0.005 | 0.2000 | 0.8000 | 1.500 |" in text
    assert "The rate of LAMB lies at the edge" in text and "momentum lies" not in text
    assert "10 epochs" in text and "; 22 minutes of runs" in text
    assert "--tuning_epochs=2 --seeds=0,1`" in text
    tiny_imagenet_page.draw(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("lamb, momentum, told", [
    ((0.50, 0.52), (0.52, 0.53), "LAMB's mean is 1.5 points below SGD's; the 2 seeds of one "
     "optimizer differ by up to 2.0 points, too few of them to tell noise by."),
    ((0.60, 0.61), (0.52, 0.53), "8.0 points above SGD's; the 2 .* up to 1.0 points, too few"),
    ((0.60,) * 5, (0.52,) * 5, "8.0 points above SGD's; the 5 seeds .* up to 0.0 points.$"),
    ((0.60,), (0.52,), "LAMB's mean is 8.0 points above SGD's, of one seed.$"),
])
def test_verdict(lamb: tuple[float, ...], momentum: tuple[float, ...], told: str) -> None:
    records = [
        {"optimizer": name, "accuracy": accuracy}
        for name, accuracies in (("lamb", lamb), ("momentum", momentum))
        for accuracy in accuracies
    ]
    assert re.search(told, tiny_imagenet_page.verdict(records))
