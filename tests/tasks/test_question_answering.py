"""Question answering: loss, scores and files, and a run that memorises a few questions."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, models
from lamb_tpu.data.text.squad import Question
from lamb_tpu.data.text.squad_source import SquadSource, Windows
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.store.metrics import read_records
from lamb_tpu.tasks import HostScored, build
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected
from tests.tasks.berts import TINY

CONTEXT = "the old man and the sea was read by a young girl in a small town"
WORDS = sorted({*CONTEXT.split(), "who", "what", "where", "?"})
VOCABULARY = Vocabulary([*SPECIAL_TOKENS, *WORDS])
WINDOWS = Windows(max_length=20, document_stride=4, max_query=5)  # several for each question


def ask(name: str, text: str, answer: str) -> Question:
    start = CONTEXT.find(answer)
    return Question(name, text, CONTEXT, ((answer, start),) if answer else (), not answer)


QUESTIONS = [
    ask("who", "who read ?", "a young girl"),
    ask("what", "what was read ?", "the old man"),
    ask("where", "where was the girl ?", "a small town"),
]
IMPOSSIBLE = ask("never", "who was small ?", "")


def source(
    questions: list[Question] = QUESTIONS, training: bool = False, windows: Windows = WINDOWS
) -> SquadSource:
    return SquadSource("made", questions, VOCABULARY, False, windows, training)


def logits_for(actual: SquadSource, spans: dict[str, dict[str, float]]) -> dict[str, np.ndarray]:
    """Returns logits: half of a given text's score at the text's start and end, and -9 elsewhere."""
    features = actual.features
    starts, ends = (np.full(features.char_start.shape, -9.0, np.float32) for _ in range(2))
    for row, number in enumerate(features.question):
        for text, score in spans[actual.questions[number].id].items():
            if not text:
                starts[row, 0] = ends[row, 0] = score / 2
                continue
            first = CONTEXT.find(text)
            starts[row, features.char_start[row] == first] = score / 2
            ends[row, features.char_stop[row] == first + len(text)] = score / 2
    return {"start_logits": starts, "end_logits": ends}


def test_scores_and_files() -> None:
    task, actual = build("question_answering", models.build(**TINY, heads=("span",))), source()
    assert isinstance(task, HostScored) and len(actual) > len(QUESTIONS)
    outputs = logits_for(
        actual,
        {
            "who": {"young girl": 8.0, "in": 2.0},  # correct except for an article
            "what": {"man and": 6.0},  # shares one word of two with "old man"
            "where": {"sea": 1.0},
        },
    )
    metrics, files = task.score(actual, outputs)
    assert metrics == pytest.approx({"exact_match": 100 / 3, "f1": (100 + 50 + 0) / 3})
    predictions = json.loads(files["predictions.json"])
    assert predictions == {"who": "young girl", "what": "man and", "where": "sea"}
    best = json.loads(files["nbest_predictions.json"])
    assert best.keys() == predictions.keys()
    expected = (("young girl", 8.0), ("young girl in", 5.0), ("in", 2.0))
    assert best["who"][:3] == [{"text": text, "score": score} for text, score in expected]
    assert len(best["who"]) == 20 and max(answer["score"] for answer in best["who"][3:]) <= -5


def test_fields_of_the_decoding() -> None:
    model, actual = models.build(**TINY, heads=("span",)), source()
    spans = {"who": {"a young girl": 8.0, "girl": 6.0}, "what": {"old man": 4.0}}
    outputs = logits_for(actual, spans | {"where": {"sea": 1.0}})
    narrow = build("question_answering", model, num_best=2, max_answer_length=2)
    _, files = narrow.score(actual, outputs)
    best = json.loads(files["nbest_predictions.json"])
    assert best["who"] == [{"text": "girl", "score": 6.0}]  # "a young girl" is too long
    assert all(len(answers) <= 2 for answers in best.values())


def test_questions_without_an_answer() -> None:
    model, actual = models.build(**TINY, heads=("span",)), source([QUESTIONS[0], IMPOSSIBLE])
    outputs = logits_for(
        actual, {"who": {"a young girl": 8.0, "": 9.0}, "never": {"sea": 3.0, "": 6.0}}
    )
    for threshold, predictions, exact in (
        (0.0, {"who": "", "never": ""}, 50),
        (2.0, {"who": "a young girl", "never": ""}, 100),
        (4.0, {"who": "a young girl", "never": "sea"}, 50),
    ):
        task = build("question_answering", model, version2=True, null_threshold=threshold)
        metrics, files = task.score(actual, outputs)
        assert json.loads(files["predictions.json"]) == predictions
        assert metrics == {"exact_match": exact, "f1": exact}


def test_version_2_is_scored_like_its_script() -> None:
    model = models.build(**TINY, heads=("span",))
    bare = dataclasses.replace(QUESTIONS[0], answers=(("a", 0),))  # empty after normalisation
    actual = source([bare])
    outputs = logits_for(actual, {"who": {"a young girl": 1.0, "": 9.0}})
    for version2, right in ((True, 100), (False, 0)):
        task = build("question_answering", model, version2=version2)
        assert task.score(actual, outputs)[0] == {"exact_match": right, "f1": right}


def test_loss_is_half_of_each_end_over_all_positions() -> None:
    rng = np.random.default_rng(0)
    batch = {
        "input_ids": np.zeros((3, 5), np.int32),
        "start_logits": rng.normal(0, 2, (3, 5)),
        "end_logits": rng.normal(0, 2, (3, 5)),
        "start_position": np.array([0, 2, 4]),
        "end_position": np.array([0, 3, 4]),
    }
    batch["start_logits"][1, 2] = batch["end_logits"][1, 3] = 9  # both ends are correct
    batch["end_logits"][0, 0] = batch["start_logits"][2, 4] = 9  # half correct does not count
    batch["start_logits"][0, 0] = batch["end_logits"][2, 4] = -9
    model = models.Model(lambda key, x: {"params": {}}, lambda v, x, **_: (x, {}))
    task = build("question_answering", model)
    terms, (state, sums) = task.loss({}, {}, batch, jax.random.key(0))
    total = 0.0
    for edge in ("start", "end"):
        for row in range(3):
            x, at = batch[f"{edge}_logits"][row], batch[f"{edge}_position"][row]
            total += (np.log(np.exp(x).sum()) - x[at]) / 2
    assert float(terms["span"]) == pytest.approx(total, rel=1e-5)
    assert task.weights(batch) == {"span": 3} and state == {}
    assert tuple(map(float, sums["span_accuracy"])) == (1, 3)


def test_data_that_does_not_fit() -> None:
    fields = TINY | {"vocab_size": len(VOCABULARY), "max_positions": 20}
    task, other = (
        build("question_answering", models.build(**fields, heads=heads))
        for heads in (("span",), ("mlm",))
    )
    with rejected("config.model.heads", ..., "has no 'span', which question_answering"):
        other.check(source(training=True))
    with rejected("made", ..., "has questions without an answer, as in SQuAD v2"):
        task.check(source([*QUESTIONS, IMPOSSIBLE], training=True))
    with rejected("made", ..., "has the fields input_ids,", "use a data set with input_ids,"):
        task.check(source())
    task.check(source(training=True))


def test_the_recipe_can_be_given_questions_without_an_answer() -> None:
    """An error suggests version2; the command line can only set it if the recipe has this key."""
    task = dict(tiny.recipe_file(tiny.ROOT / "configs" / "bert_squad.py").get_config().task)
    built = build(task.pop("name"), models.build(**TINY, heads=("span",)), **task)
    assert {"version2", "null_threshold"} <= set(task) and built.version2 is False


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("num_best", 0, ("is out of range", "use at least 1")),
        ("max_answer_length", 2.5, ("has the wrong type",)),
        ("version2", "yes", ("has the wrong type",)),
        ("null_threshold", float("nan"), ("is out of range",)),
        ("score_names", ..., ("is unknown", "task 'question_answering' has: name,")),
    ],
)
def test_errors(name: str, value: Any, message: tuple[str, ...]) -> None:
    with rejected(f"config.task.{name}", value, *message):
        build("question_answering", models.build(**TINY), **{name: value})


@pytest.mark.long
def test_run_learns_its_questions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, split: str, **_: Any) -> data.Source:
        return source(training=split == "train", windows=Windows(28, 4, 5))  # one window each

    monkeypatch.setattr(data, "load", load)
    model = {**TINY, "vocab_size": len(VOCABULARY), "max_positions": 28, "heads": ("span",)}
    model |= {"num_layers": 1}
    config = tiny.digits(
        model=ConfigDict(model | {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}),
        task=ConfigDict({"name": "question_answering"}),
        optimizer=ConfigDict({"name": "adam", "learning_rate": 3e-3}),
        data__train_split="train",
        batch_size=8,
        duration="40 steps",
        schedule__warmup="0 steps",
        eval__every="40 steps",
        eval__batch_size=8,
        checkpoint__best="f1",
        checkpoint__every="40 steps",
        log__every="10 steps",
    )
    metrics = train(config, tmp_path, quiet=True)
    assert metrics == {"exact_match": 100, "f1": 100}
    losses = [record["loss"] for record in read_records(tmp_path / "metrics.jsonl", "train")]
    assert losses[-1] < 0.5 * losses[0]
    expected = {question.id: question.answers[0][0] for question in QUESTIONS}
    best = json.loads((tmp_path / "nbest_predictions.json").read_text())
    assert {id_: answers[0]["text"] for id_, answers in best.items()} == expected
    assert json.loads((tmp_path / "predictions.json").read_text()) == expected
    (tmp_path / "predictions.json").unlink()
    assert evaluate_checkpoint(config, tmp_path, "best")["f1"] == 100
    assert json.loads((tmp_path / "predictions.json").read_text()) == expected
