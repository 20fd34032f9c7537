"""Tables are read from TOML, and every mistake in one is a sentence that names file and key."""

import pathlib
import re

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import loading
from tests.reproduce.papers import TABLE, write


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
    table = write(
        tmp_path,
        TABLE.replace(
            "seeds = 2",
            """minutes = {cpu = 3, gpu = 0.5}

[tune]
range = [0.5, 2]
overrides = {duration = "2 steps"}
""",
        ),
    )
    assert table.scales["small"].minutes == {"cpu": 3.0, "gpu": 0.5}
    assert (table.space.key, table.space.low, table.space.high) == (
        "optimizer.learning_rate",
        0.5,
        2.0,
    )
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


def test_what_no_table_has(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    assert (table.paper.name, table.paper.missing) == ("small", ())
    path = tmp_path / "small" / "paper.toml"
    path.write_text('title = "A"\nname = "B"\nmissing = [{what = "Table 3", why = "unknown"}]\n')
    paper = loading.load_all(tmp_path)["small/digits"].paper
    assert (paper.name, paper.missing) == ("B", (("Table 3", "unknown"),))
    path.write_text('title = "A"\nmissing = [{what = "Table 3"}]\n')
    with pytest.raises(UserError, match=r"paper.toml: missing\[1\].why is missing"):
        loading.load_all(tmp_path)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("title =", "titel =", "title is missing"),
        (
            "examples = 1_437",
            "examples = 1.5",
            "scales.small.examples is 1.5; it must be of type int",
        ),
        ('source = "Table 9"', 'sauce = "Table 9"', "sauce is unknown; known: .*source"),
        ('known = "recalled"', 'known = "guessed"', "known is 'guessed'; known: seen, recalled"),
        ("digits = 1", 'digits = "1"', "metric.digits is '1'; it must be of type int"),
        (
            "digits = 1, factor = 100.0}",
            'digits = 1}\ncolumns = ["loss"]',
            "columns is .'loss'.; give a list of some of: updates, average_batch",
        ),
        ("[scales.small]", "[scales.huge]", "scales.huge is unknown; known: smoke, small, paper"),
        ('config = "digits:batch=128"', "", "scales.small must have either config"),
        (
            'name = "lamb"',
            'name = "lamb", config = "a", stages = ["b"]',
            "cell lamb must have either",
        ),
        (
            'name = "lamb"',
            'name = "lamb", stages = ["a", "b"]',
            "cell lamb has 2 stages; .* has 1, of",
        ),
        (
            'name = "lamb"',
            'name = "lamb", row = "LAMB"',
            "all cells must have a row and a column, or",
        ),
        (
            'name = "lamb"',
            'name = "lamb", first = {batch_size = 1}',
            "cell lamb has keys of the first",
        ),
        (
            'name = "lamb"',
            'name = "lamb", baseline = "sgd"',
            "cell lamb has baseline 'sgd'; it must",
        ),
        (
            'name = "lamb"',
            'name = "lamb", tuned_by = "adamw"',
            "cell lamb has tuned_by 'adamw'; it",
        ),
        ("seeds = 2", "seeds = 0", "scales.small.seeds is 0; it must be at least 1"),
        ("seeds = 2", "cpu_devices = 0", "scales.small.cpu_devices is 0; it must be at least 1"),
        ('name = "adamw"', 'name = "lamb"', r"cells\[2\].name is 'lamb', which another cell has"),
        ('name = "adamw"', 'name = "Adam W"', "name 'Adam W' must be of lower-case letters"),
        ("{accuracy = 92.5}", "{accuracy = true}", "published.accuracy of cell adamw is True"),
        (
            "[scales.small]",
            '[tuning]\nkey = "a"\nfactors = [0]\n[scales.small]',
            "tuning.factors is",
        ),
        (
            "[scales.small]",
            "[tune]\nrange = [8, 1]\n[scales.small]",
            "tune.range is .* smaller first",
        ),
        (
            "seeds = 2",
            "minutes = {cuda = 3}",
            "scales.small.minutes.cuda is unknown; known: cpu, gpu",
        ),
        ('title = "Digits', "title = Digits", "is not TOML"),
        (
            "seeds = 2",
            'data = ["a", "b"]',
            "scales.small.data is .* folder for each of the 1 stage",
        ),
    ],
)
def test_mistakes(tmp_path: pathlib.Path, old: str, new: str, message: str) -> None:
    assert old in TABLE
    with pytest.raises(UserError, match=message) as raised:
        write(tmp_path, TABLE.replace(old, new, 1))
    assert str(tmp_path / "small" / "digits.toml") in str(raised.value)


def test_folder_without_papers(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=f"--papers {re.escape(str(tmp_path))} has no tables"):
        loading.load_all(tmp_path)


def test_shipped_tables_are_sound() -> None:
    found = loading.load_all(loading.folder())
    assert "lamb/mnist" in found
    for table in found.values():
        assert any(not cell.unknown for cell in table.cells.values()), table.key


@pytest.mark.parametrize(
    "before, after, reason",
    [
        (
            'config = "digits:batch=128"',
            'config = "evil.py"',
            "names the recipe 'evil.py', a file of",
        ),
        (
            'name = "adamw"',
            'name = "adamw", stages = ["evil.py:x"]',
            "names the recipe 'evil.py:x'",
        ),
        (
            'name = "lars"',
            'name = "lars", overrides = {"model.name" = "subprocess:getoutput"}',
            "config.model.name is 'subprocess:getoutput' in .*digits.toml, and subprocess belongs to",
        ),
    ],
)
def test_code_of_the_folder_needs_the_flag(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    assert before in TABLE
    with pytest.raises(UserError, match=f"{reason}.*--trust-papers"):
        write(tmp_path, TABLE.replace(before, after))
    loading.load_all(tmp_path, trusted=True)
