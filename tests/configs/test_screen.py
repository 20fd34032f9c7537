"""Tests that the first output of every recipe fits a terminal of 80 columns and 24 rows."""

import pathlib
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.data import FieldSpec
from lamb_tpu.run import memory, phases
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.describe import describe
from tests import tiny
from tests.configs.test_golden_tables import TABLES

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)


class Unread(data.ArraySource):
    """A data set with the shapes and size of a real data set; it yields only zeros."""

    questions = ()

    def __init__(self, name: str, spec: dict[str, FieldSpec], length: int) -> None:
        arrays = {field: np.zeros((1, *each.shape), each.dtype) for field, each in spec.items()}
        super().__init__(name, arrays, None)
        self._length = length

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> data.Batch:
        return {field: array[[0] * len(indices)] for field, array in self.arrays.items()}


def spec_of(config: ConfigDict, inputs: Any) -> dict[str, FieldSpec]:
    options = config.data.options
    if config.task.name == "classification":
        return {
            "image": FieldSpec(inputs.shape[1:], np.dtype(np.uint8)),
            "label": FieldSpec((), _INT),
        }
    length = options.get("sequence_length") or options.max_length
    spec = {name: FieldSpec((length,), _INT) for name in inputs}
    if config.task.name == "question_answering":
        return spec | {name: FieldSpec((), _INT) for name in ("start_position", "end_position")}
    shape = (options.max_predictions,)
    spec |= {name: FieldSpec(shape, _INT) for name in ("masked_positions", "masked_ids")}
    return spec | {
        "masked_weights": FieldSpec(shape, _FLOAT),
        "next_sentence_label": FieldSpec((), _INT),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in TABLES if not name.endswith("_lars")])
def test_start_of_a_recipe_fits_a_screen(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, argument, inputs, (optimizer, *_) = TABLES[name]
    recipe_config: ConfigDict = tiny.recipe_file(tiny.ROOT / "configs" / file).get_config(
        f"{argument},optimizer={optimizer}"
    )
    config = phases.split(recipe_config)[0].config
    # The check of memory would reject BERT-Large on 8 simulated devices.
    monkeypatch.setattr(memory, "check_memory", lambda *_: None)
    is_known = config.task.name in (
        "language_model",
        "translation",
    )  # shapes are known without files
    monkeypatch.setattr(
        data,
        "load",
        data.load_shapes
        if is_known
        else lambda _, split, **options: Unread(f"set:{split}", spec_of(config, inputs), 1_281_167),
    )
    monkeypatch.setattr(Run, "model_flops", 123_456_789_012_345_678)  # counting FLOPs takes long
    monkeypatch.chdir(tmp_path)
    text = describe(prepare(config, "run"))
    lines = text.splitlines()
    home = f"workdir: {tmp_path}"  # the path's length depends on the test folder
    assert [line for line in lines if len(line.replace(home, "workdir: ~")) > 80] == []
    assert len(lines) <= 24
    for beginning in ("workdir: ", "mesh: ", "data: ", "run: ", "learning rate: ", "model: "):
        assert any(line.startswith(beginning) for line in lines), beginning
    rows = len((tiny.ROOT / "tests" / "golden_tables" / f"{name}.txt").read_text().splitlines())
    # The settings take up to 13 of the 24 rows; two of these 13 are about the parameters.
    assert ("the table is in parameters.txt; total: " in text) is (rows > 11)
    assert ("\npath " in text and "\ntotal: " in text) is (rows <= 11)
