"""Tables are read from TOML; an error names file and key."""

import pathlib

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import loading
from tests.raising import rejected
from tests.reproduce.papers import TABLE, with_keys, write


def test_table(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    assert (table.key, table.paper.arxiv, table.source) == ("small/digits", "0000.00000", "Table 9")
    assert [cell.known for cell in table.cells.values()] == ["recalled", "seen", "recalled"]
    scale = table.scales["small"]
    assert scale.stages == ("digits:batch=128",) and scale.seeds == 2
    assert scale.overrides == {"duration": "4 steps", "log.every": "2 steps"}
    assert table.records == tmp_path / "small" / "digits.jsonl" and table.columns == ()
    asked = 'columns = ["average_batch", "updates"]\n\n[scales.small]'
    table = write(tmp_path, TABLE.replace("[scales.small]", asked))
    assert table.columns == ("average_batch", "updates")


def test_estimates_and_spaces(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace("seeds = 2", "minutes = {cpu = 3, gpu = 0.5}")
    tune = '\n[tune]\nrange = [0.5, 2]\noverrides = {duration = "2 steps"}\n'
    table = write(tmp_path, text + tune)
    assert table.scales["small"].minutes == {"cpu": 3.0, "gpu": 0.5}
    assert (table.space.key, table.space.range) == ("optimizer.learning_rate", (0.5, 2.0))
    assert table.space.overrides == {
        "duration": "2 steps",
        "data.train_split": "train[:90%]",
        "data.eval_split": "train[90%:]",
    }


def test_keys_may_be_dotted_or_nested(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        'overrides = {duration = "4 steps", "log.every" = "2 steps"}',
        '[scales.small.overrides]\nlog.every = "2 steps"\noptimizer.b2 = 0.9',
    )
    text = text.replace("seeds = 2\n", "")
    scale = write(tmp_path, text).scales["small"]
    assert scale.overrides == {"log.every": "2 steps", "optimizer.b2": 0.9}


def test_missing_results_of_a_paper(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    assert (table.paper.name, table.paper.missing) == ("small", ())
    path = tmp_path / "small" / "paper.toml"
    path.write_text('title = "A"\nname = "B"\nmissing = [{what = "Table 3", why = "unknown"}]\n')
    paper = loading.load_all(tmp_path)["small/digits"].paper
    assert (paper.name, paper.missing) == ("B", (("Table 3", "unknown"),))
    path.write_text('title = "A"\nmissing = [{what = "Table 3"}]\n')
    with rejected("*paper.toml: missing[1].why", ..., "is missing"):
        loading.load_all(tmp_path)


_CONFIG, _SCALE = 'config = "digits:batch=128"', "[scales.small]"
_TUNING, _MANY = '[tuning]\nkey = "a"\n', f"factors = [{'1, ' * 100}]"
_EPOCH = 'metric = {key = "epoch", label = "a"}'
_HUGE = "9" * 4_000


@pytest.mark.parametrize(
    "old, new, key, problem, remedy",
    [
        ("title =", "titel =", "titel", "is unknown", "use title,"),
        ('title = "Digits by optimizer"', "", "title", "is missing", ""),
        ("examples = 1_437", "examples = 1.5", "scales.small.examples", "is not valid", "type int"),
        ('source = "Table 9"', 'sauce = "Table 9"', "sauce", "is unknown", "source"),
        ('known = "recalled"', 'known = "guessed"', "known", "", ""),
        ("digits = 1", 'digits = "1"', "metric.digits", "is not valid", "use the type int"),
        (
            "known =",
            'columns = ["loss"]\nknown =',
            "columns",
            "has an unknown",
            "updates, average_b",
        ),
        (_SCALE, "[scales.huge]", "scales.huge", "is unknown", "smoke, small or paper"),
        (_CONFIG, "", "scales.small", "has neither config nor stages", "give"),
        ("seeds = 2", "seeds = 0", "scales.small.seeds", "is not valid", "use at least 1"),
        ("seeds = 2", "cpu_devices = 0", "scales.small.cpu_devices", "is not valid", "at least 1"),
        ('name = "adamw"', 'name = "lamb"', "cells[2].name", "is the name of another cell", ""),
        ('name = "adamw"', 'name = "Adam W"', "name of a cell", "", "use lower-case letters"),
        ("{accuracy = 92.5}", "{accuracy = true}", "published.accuracy of cell adamw", "", ""),
        (
            _SCALE,
            f"{_TUNING}factors = [0]\n{_SCALE}",
            "tuning.factors[1]",
            "is not valid",
            "above 0",
        ),
        (_SCALE, f"[tune]\nrange = [8, 1]\n{_SCALE}", "tune.range", "does not ascend", ""),
        ("factor = 100.0", "factor = 100.0, chance = 10", "metric.chance", "is not below 1", "0.1"),
        ("seeds = 2", "minutes.cuda = 3", "scales.small.minutes.cuda", "is unknown", "cpu, gpu"),
        ('title = "Digits', "title = Digits", "", "is not TOML", ""),
        (
            "seeds = 2",
            'data = ["a", "b"]',
            "scales.small.data",
            "must have one entry per stage, 1 in all",
            "",
        ),
        ("digits = 1", "digits = 1_000_000_000_000", "metric.digits", "", "use at most"),
        ("digits = 1", "digits = -4", "metric.digits", "", "use at least 0"),
        ("factor = 100.0", "factor = nan", "metric.factor", "", "use above 0"),
        ("factor = 100.0", "factor = inf", "metric.factor", "", "use at most 1000000"),
        ("seeds = 2", "seeds = 1_000_000_000_000", "scales.small.seeds", "", "use at most"),
        ("seeds = 2", f"cpu_devices = {10**12}", "scales.small.cpu_devices", "", "use at most"),
        ("seeds = 2", f"seeds = {_HUGE}", "scales.small.seeds", "", "use at most"),
        ("seeds = 2", "minutes = {cpu = inf}", "scales.small.minutes.cpu", "", "use at most"),
        ("= 92.5", f"= {_HUGE}", "published.accuracy of cell adamw", "", ""),
        ("= 92.5", "= nan", "published.accuracy of cell adamw", "", ""),
        ("= 92.5", "= inf", "published.accuracy of cell adamw", "", ""),
        ('"diverged"', f'"{_HUGE}"', "published.accuracy of cell lars", "", "at most 100 charac"),
        (_SCALE, f"{_TUNING}factors = [1]\nseeds = -1\n{_SCALE}", "tuning.seeds", "", "at least 1"),
        (_SCALE, f"[tuning]\n{_SCALE}", "tuning.key", "", ""),
        (_SCALE, f"{_TUNING}seeds = 1000\n{_MANY}\n{_SCALE}", "the scale small", "", "use at most"),
        ('key = "accuracy"', 'key = "step"', "metric.key", "", "accuracy"),
        ('key = "accuracy"', 'key = "kind"', "metric.key", "", "accuracy"),
        (_CONFIG, f"{_CONFIG}\n{_EPOCH}", "scales.small.metric.key", "", "accuracy"),
        ("seeds = 2", f"nested = {'[' * 20_000}", "", "", "correct it"),
        ("seeds = 2", f"nested.{'a.' * 3_000}a = 1", "", "", "correct it"),
    ],
)
def test_errors(
    tmp_path: pathlib.Path, old: str, new: str, key: str, problem: str, remedy: str
) -> None:
    assert old in TABLE
    path = tmp_path / "small" / "digits.toml"
    with rejected(f"{path}: {key}" if key else path, ..., problem, remedy) as caught:
        write(tmp_path, TABLE.replace(old, new, 1))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "keys, key, problem, remedy",
    [
        ('config = "a", stages = ["b"]', "cell lamb", "has both config and stages", ""),
        (
            'stages = ["a", "b"]',
            "stages of cell lamb",
            "has 2 entries, which replace the last stages",
            "1",
        ),
        ('row = "LAMB"', "cells", "do not all have a row and a column", ""),
        ("first.batch_size = 1", "first of cell lamb", "has keys of the first of several st", ""),
        ('baseline = "sgd"', "baseline of cell lamb", "is not a cell of", "lamb, adamw or lars"),
        ('tuned_by = "adamw"', "tuned_by of cell lamb", "the table has no [tuning]", ""),
    ],
)
def test_errors_of_a_cell(
    tmp_path: pathlib.Path, keys: str, key: str, problem: str, remedy: str
) -> None:
    with rejected(f"{tmp_path / 'small' / 'digits.toml'}: {key}", ..., problem, remedy):
        write(tmp_path, with_keys(lamb=keys))


def test_folder_without_papers(tmp_path: pathlib.Path) -> None:
    with rejected("--papers", str(tmp_path), "has no tables"):
        loading.load_all(tmp_path)


def test_shipped_tables_are_sound() -> None:
    actual = loading.load_all(loading.folder())
    assert "lamb/mnist" in actual
    for table in actual.values():
        assert any(not cell.unknown for cell in table.cells.values()), table.key


@pytest.mark.parametrize(
    "text, reason",
    [
        (TABLE.replace(_CONFIG, 'config = "evil.py"'), "recipe='evil.py' is a file of Python code"),
        (with_keys(adamw='stages = ["evil.py:x"]'), "recipe='evil.py:x' is a file"),
        (
            with_keys(lars='overrides = {"model.name" = "subprocess:getoutput"}'),
            "config.model.name.*'subprocess:getoutput'",
        ),
    ],
)
def test_code_of_the_folder_needs_the_flag(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(UserError, match=f"{reason}.*--trust-papers"):
        write(tmp_path, text)
    loading.load_all(tmp_path, trusted=True)
