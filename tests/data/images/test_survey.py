"""Surveys of folders of pictures."""

import pathlib

import pytest

from lamb_tpu.data.images.folder import FolderRecords, split_names
from lamb_tpu.data.images.survey import Survey, survey
from lamb_tpu.errors import UserError
from tests.data.images.pictures import claiming, encode, smooth


def make(
    root: pathlib.Path, *names: str, height: int = 40, width: int = 60, kind: str = "rgb"
) -> None:
    content = encode(smooth(height, width), kind)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


@pytest.mark.parametrize(
    "train, held",
    [("train", "val"), ("Training", "Test"), ("train", "validation"), ("train", "photos_of_may")],
)
def test_splits_by_their_names(tmp_path: pathlib.Path, train: str, held: str) -> None:
    make(tmp_path, f"{train}/a/1.jpg", f"{train}/b/1.jpg", f"{train}/b/2.jpg", f"{held}/c/1.jpg")
    assert survey(tmp_path) == Survey(train, held, 3, 3, 40)


def test_val_comes_before_test(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "train/a/1.jpg", "test/a/1.jpg", "val/a/1.jpg", "extra/a/1.jpg")
    assert survey(tmp_path)[:2] == ("train", "val")


@pytest.mark.parametrize("split", ["train", "all_of_them"])
def test_one_split(tmp_path: pathlib.Path, split: str) -> None:
    make(tmp_path, f"{split}/a/1.jpg", f"{split}/b/1.jpg")
    assert survey(tmp_path) == Survey(split, split, 2, 2, 40)


def test_folders_of_classes_alone(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "cat/1.jpg", "cat/2.jpg", "dog/1.jpg")
    make(tmp_path, "dog/2.png", height=50, width=30, kind="png")
    assert split_names(tmp_path) == ["train"]
    assert survey(tmp_path) == Survey("train", "train", 4, 2, 40)
    records = FolderRecords(tmp_path, "train")
    assert [record.label for record in records.read(range(4))] == [0, 0, 1, 1]
    assert records.name(2) == str(tmp_path / "dog" / "1.jpg")


def test_list(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "1.jpg", height=90, width=80)
    lines = ["file\tsplit\tlabel", "1.jpg\ttrain\t0", "1.jpg\tval\t4"]
    (tmp_path / "labels.tsv").write_text("\n".join(lines))
    assert survey(tmp_path) == Survey("train", "val", 1, 5, 80)


def test_side_is_the_median_of_what_can_be_read_and_nothing_is_decoded(
    tmp_path: pathlib.Path,
) -> None:
    for name, height, width in (("a", 100, 200), ("b", 300, 150), ("c", 60_000, 65_000)):
        (tmp_path / "train" / "x").mkdir(parents=True, exist_ok=True)
        for kind in ("rgb", "png"):
            content = claiming(kind, height, width)
            (tmp_path / "train" / "x" / f"{name}_{kind}.jpg").write_bytes(content)
    (tmp_path / "train" / "x" / "d.jpg").write_bytes(b"no picture")
    assert survey(tmp_path).side == 150


@pytest.mark.parametrize(
    "names, message",
    [
        (
            ("one/a/1.jpg", "two/a/1.jpg"),
            "has the splits one, two, of which none is called train or t",
        ),
        (("train/a/1.jpg", "x/a/1.jpg", "y/a/1.jpg"), "none is called val or valid or validation"),
        ((), "has the splits none"),
    ],
)
def test_which_split_is_not_told(
    tmp_path: pathlib.Path, names: tuple[str, ...], message: str
) -> None:
    make(tmp_path, *names)
    with pytest.raises(UserError, match=message):
        survey(tmp_path)


def test_no_picture(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "train/a/1.jpg")
    (tmp_path / "train" / "a" / "1.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="has no picture in train that can be read"):
        survey(tmp_path)


def test_holdout_parts_the_pictures(tmp_path: pathlib.Path) -> None:
    names = [f"{kind}/{index}.jpg" for kind in ("cat", "dog") for index in range(300)]
    make(tmp_path, *names)

    def parts(share: float) -> list[set[str]]:
        return [
            {records.name(index) for index in range(len(records))}
            for records in (
                FolderRecords(tmp_path, "train", holdout=share, training=training)
                for training in (True, False)
            )
        ]

    train, held = parts(0.2)
    assert not train & held and len(train | held) == 600
    assert 85 < len(held) < 155  # four standard deviations about 120
    assert 40 < sum("/cat/" in name for name in held) < 80  # of each class
    (tmp_path / "cat" / "new.jpg").write_bytes(b"")  # moves no other
    assert held - parts(0.2)[1] == set() and parts(0.3)[1] > held
    with pytest.raises(UserError, match="holdout=1e-09 leaves no picture of .* to evaluate; give"):
        parts(1e-9)
