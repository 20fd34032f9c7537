"""The benchmarks run at small size and print their tables."""

import functools
import importlib.util
import re

import jax
import numpy as np
import pytest

from experiments.bench import agreement, bert, convolution, image_routes, lstm
from experiments.bench.bert import Target
from experiments.bench.image_throughput import start
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests import tiny
from tests.data.images.photographs import encode, smooth
from tests.plan.test_main import needs_compiler
from tests.shared import shared

pytestmark = pytest.mark.optimized  # this also applies to the commands that the tests start


def _rows(text: str) -> list[list[str]]:
    """Returns the cells of the first table, without its header."""
    table = text[text.index("\n| update") :].strip().split("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


@pytest.mark.long
def test_update_speed():
    done = tiny.command("experiments.bench.update_speed", "--layers=1", "--width=64", "--rounds=1")
    assert done.returncode == 0, done.stderr
    rows = {row[0]: row[1:] for row in _rows(done.stdout)}
    assert list(rows) == [
        "optax.adamw",
        "optax.lamb",
        "torch AdamW, fused",
        "timm Lamb",
        "timm Lamb, foreach",
        "lamb",
        "lamb, stacked layers",
    ]
    # On a CPU, AdamW makes a pass for each of m, v and p: 3 + 3 + 4 words per value instead of 7.
    assert rows["optax.adamw"][4:] == ["1.43", "0.0 %"]
    installed = all(importlib.util.find_spec(name) for name in ("torch", "timm"))
    assert rows["timm Lamb"][0].startswith("not installed") == (not installed)
    targets = [line for line in done.stdout.splitlines() if " time / optax.lamb | 0.60 | " in line]
    assert len(targets) == 2


@pytest.mark.long
def test_update_tpu():
    done = tiny.command("experiments.bench.update_tpu", "--layers=1", "--width=64")
    if importlib.util.find_spec("libtpu") is None:
        assert done.returncode == 2
        assert done.stderr.startswith("error: the TPU compiler is not installed")
        return
    assert done.returncode == 0, done.stderr
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in _rows(done.stdout)}
    assert rows["optax.adamw"][6] == rows["lamb"][6] / 2 == 30  # fusions: one or two per leaf
    assert rows["lamb"][5] < 1.05 < rows["optax.lamb"][5]  # bytes relative to the lower bound


@pytest.mark.long
@pytest.mark.parametrize("module", [lstm.Ours, lstm.Flax])
def test_layers_of_the_lstm_benchmark(module):
    size = lstm.Size("tiny", 5, 3, 4, 6, 2)
    (weights, inputs) = lstm.of_jax(module(size.features, size.layers), size)()
    # A layer has four gates of 6 units; each has an input kernel, a recurrent kernel and a bias.
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    assert count == 4 * 6 * (4 + 6 + 1) + 4 * 6 * (6 + 6 + 1)
    assert inputs.shape == (5, 3, 4) and np.abs(inputs).max() > 0


@pytest.mark.long
def test_products_of_the_lstm_benchmark():
    """Checks the shapes of each layer's products: hidden state, gates, gradients of inputs and kernels."""
    done = lstm.of_products(lstm.Size("tiny", 5, 3, 4, 6, 2))()
    shapes = [(3, 6), (3, 24), (5, 3, 4), (4, 24), (6, 24)]
    shapes += [(3, 6), (3, 24), (5, 3, 6), (6, 24), (6, 24)]
    assert [leaf.shape for leaf in done] == shapes


def test_table_of_the_lstm_benchmark():
    size = lstm.SIZES[1]
    text = lstm.table({size: {"ours": 0.002, "flax": 0.004, "products": 0.001}})
    assert "| PTB small | 20, 20, 2 x 200 | 2.00 | 1.00 | 4.00 | not installed | 0.50 | - |" in text


@pytest.mark.long
def test_lstm():
    done = tiny.command("experiments.bench.lstm", "--rounds=1", "--most_features=200")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[5:]]
    assert [row[0] for row in rows] == ["MNIST row by row", "PTB small"]
    assert all(float(row[2]) > 0 and float(row[6]) > 0 for row in rows)


@pytest.mark.long
@needs_compiler
def test_lstm_on_a_tpu():
    done = tiny.command("experiments.bench.lstm_tpu", "--features=128", "--words=256")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[5:]]
    assert [row[0] for row in rows] == ["20", "160"]
    for _, ours, theirs, ratio in rows:
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), abs=0.2)
        assert 0 < float(ours) < float(theirs)


@pytest.mark.long
def test_convolution():
    done = tiny.command("experiments.bench.convolution", "--batch=4", "--rounds=1")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[5:]]
    assert len(rows) == len(convolution.LAYERS) and "batch 4, float32" in done.stdout
    for _, _, *cells in rows:
        values = [float(cell) for cell in cells]
        assert min(values[:2] + values[3:5]) > 0


@pytest.mark.long
def test_save_stall():
    done = tiny.command(
        "experiments.bench.save_stall", "--megabytes=12", "--rounds=1", "--steps=2", "--note=Idle."
    )
    assert done.returncode == 0, done.stderr
    head, note, *_, last = done.stdout.splitlines()
    assert head.startswith("State of 12 MB") and note == "Idle."
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+) \| [\d.]+ \|$", done.stdout, re.MULTILINE))
    assert len(rows) == 5 and all(float(value) > 0 for value in rows.values())
    assert last == f"The call takes {float(last.split()[3]):.3f} times as long as a blocking save."


def test_text_throughput(tmp_path):
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = Vocabulary([*SPECIAL_TOKENS, ".", *letters, *(f"##{x}" for x in letters)])
    vocabulary.write(tmp_path / "vocab")
    for name in ("a.txt", "b.md", "c.rst"):
        (tmp_path / name).write_text("It is a sentence of no great length. So is it.\n" * 400)
    done = tiny.command(
        "experiments.bench.text_throughput",
        f"--text_dir={tmp_path}",
        f"--vocab={tmp_path}/vocab",
        "--rounds=1",
        "--batches=2",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 files, 0.0 MB of text; Python ")
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == ["`encode_batch`", "`encode_batch_fast`", "preparation"]
    (plain, ratio), (ours, one) = ([float(cell) for cell in rows[n][1:]] for n in (0, 2))
    assert one == 1 and abs(ratio - ours / plain) < 0.05 * ratio + 0.01
    pattern = r"^\| (128|512), (?:20|80).* \| (?:memory|files) \| ([\d,]+) \| ([\d.]+) \|$"
    batches = re.findall(pattern, done.stdout, re.MULTILINE)
    assert len(batches) == 8
    for length, rate, cores in batches:
        needed = 512_000 / int(length) / int(rate.replace(",", ""))
        assert abs(needed - float(cores)) < 0.01


def test_bert_large():
    assert bert.num_values(24, 1024) == 336_226_108  # with both pre-training heads
    assert [len(bert.leaf_shapes(24, 1024, stacked)) for stacked in (False, True)] == [398, 30]


def test_target_table():
    text = bert.target_table(
        [Target("a", "GB", 13.45, 13.454, 2, "why"), Target("b", "ms", 33.1, 33.2, 1, "why not")]
    )
    assert text.splitlines()[2:] == [
        "| a: GB | 13.45 | 13.45 | met |",
        "| b: ms | 33.1 | 33.2 | missed: why not |",
    ]


@pytest.mark.long
def test_train_loop_compiles_once(tmp_path):
    folder = shared("data", "mnist")
    done = tiny.command(
        "experiments.bench.train_loop",
        f"--data_dir={folder}",
        f"--prepared_dir={tmp_path}",
        "--networks=lenet5",
        "--steps=20",
        "--rounds=1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("| 1 |")


def test_image_throughput(tmp_path):
    for index in range(6):
        (tmp_path / f"{index}.JPEG").write_bytes(encode(smooth(300, 400, index)))
    done = tiny.command(
        "experiments.bench.image_throughput",
        f"--images={tmp_path}",
        "--batch=2",
        "--batches=1",
        "--rounds=1",
        "--note=Busy.",
    )
    assert done.returncode == 0, done.stderr
    head, command, note, _, *table = done.stdout[done.stdout.index("6 photographs") :].splitlines()
    assert "simplejpeg" in head and "--batch=2" in command and note == "Busy."
    rows = dict(line.strip("| ").split(" | ", 1) for line in table[2:7])
    installed = {
        "ours, files": True,
        "ours, ArrayRecord": True,
        "torchvision and Pillow, DataLoader": importlib.util.find_spec("torchvision") is not None,
        "tf.data": importlib.util.find_spec("tensorflow") is not None,
        "tf.data, images decoded in full": importlib.util.find_spec("tensorflow") is not None,
    }
    assert {name: "not installed" not in row for name, row in rows.items()} == installed
    models = [[cell.strip(" |") for cell in line.split(" | ")] for line in table[10:]]
    assert [row[:2] for row in models] == [
        ["ResNet-50", "224"],
        ["EfficientNet-B0", "224"],
        ["EfficientNet-B2", "260"],
        ["EfficientNet-B5", "456"],
    ]
    for *_, wanted, rate, cores in models:
        needed = int(wanted.replace(",", "")) / int(rate.replace(",", ""))
        assert abs(needed - float(cores)) < 0.06 + 0.01 * needed


def test_image_routes_give_the_same_images(tmp_path):
    """In evaluation, all routes read the same centre crop; in training, they read crops of the image.

    The values of the image's pixels encode positions.
    """
    rows, columns = np.mgrid[0:240, 0:320]
    pixels = np.stack([columns * 0.75, rows, np.full_like(rows, 90)], -1).astype(np.uint8)
    path = tmp_path / "1.JPEG"
    path.write_bytes(encode(pixels, quality=98, subsampling=0))
    routes = [
        image_routes.ours,
        image_routes.ours_prepared(str(tmp_path)),
        image_routes.torchvision,
        image_routes.tf_data,
        functools.partial(image_routes.tf_data, full_size=True),
    ]
    seen = 0
    for route in routes:
        for training in (False, True):
            batches = start(route, [str(path)], 64, 4, training)
            if batches is None:
                continue
            batch = next(batches)
            images, labels = (batch["image"], batch["label"]) if route in routes[:2] else batch
            images = np.asarray(images)
            images = images.transpose(0, 2, 3, 1) if images.shape[1] == 3 else images
            assert images.shape == (4, 64, 64, 3) and len(labels) == 4
            width = np.abs(images[:, 32, 0, 0].astype(int) - images[:, 32, -1, 0]) / 0.75 * 64 / 63
            if training:
                assert (width < 330).all() and len(set(images[:, 0, 0, 0].tolist())) > 1
            else:
                assert np.abs(width - 210).max() < 8  # 0.875 * 240
            seen += 1
    assert seen >= 4


@pytest.mark.long
def test_exchange():
    from lamb_tpu.parallel.exchange import EXCHANGES

    done = tiny.command(
        "experiments.bench.exchange", "--layers=1", "--width=64", "--rounds=1", "--devices=4"
    )
    assert done.returncode == 0, done.stderr
    rows = {
        cells[0]: [float(cell) for cell in cells[1:]]
        for cells in (line.strip("| ").split(" | ") for line in done.stdout.splitlines()[5:])
    }
    assert set(EXCHANGES) <= set(rows) and rows["float32"][1] == rows["float32"][3] == 1
    assert 0.25 <= rows["aps"][3] < 0.27 and 0.125 <= rows["aps, e3m0"][3] < 0.14


def test_page_of_the_agreement():
    """Each ratio compares the two starts of a round: with and without the comparison."""
    starts = {
        arm: [
            {"all": all_, "cpu": 2 * all_, "start": start, "data": start / 2}
            for all_, start in pairs
        ]
        for arm, pairs in {
            "with": ((4.2, 0.02), (9.0, 0.04), (4.0, 0.03)),
            "without": ((4.0, 0.0), (8.0, 0.0), (5.0, 0.0)),
        }.items()
    }
    lines = agreement.page(starts, 3).splitlines()
    assert lines[0].startswith("Seconds to the first update of digits in 3 processes, medians of 3")
    assert lines[5:7] == [
        "| yes | 4.20 (4.00 to 9.00) | 8.40 (8.00 to 18.00) | 0.030 | 0.015 |",
        "| no | 5.00 (4.00 to 8.00) | 10.00 (8.00 to 16.00) | | |",
    ]
    assert lines[8].endswith(
        "same round: 1.05 (0.80 to 1.12). Ratio of the CPU seconds: 1.05 (0.80 to 1.12)."
    )
