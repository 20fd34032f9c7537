"""SQuAD as a data set for training and for scoring."""

import hashlib
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from lamb_tpu.data.source import ArraySource
from lamb_tpu.data.text import saved
from lamb_tpu.data.text.squad import Question, make_features, read_questions
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError


@dataclass(frozen=True)
class Windows:
    """Options of the windows over contexts, see `squad.make_features`."""

    max_length: int = 384
    document_stride: int = 128
    max_query: int = 64


@dataclass(frozen=True)
class SquadOptions(Windows):
    """Options of the windows and of the tokenizer.

    Attributes:
      vocab: path of a `vocab.txt`, or of the folder that contains it.
      cased: whether the vocabulary keeps case and accents.
    """

    vocab: str = ""
    cased: bool = False


class SquadSource(ArraySource):
    """Windows over questions and their contexts, in the order of the questions.

    Fields of an example, with length L: `input_ids` and `token_type_ids` int32 (L,),
    `attention_mask` bool (L,); in training `start_position` and `end_position` int32 (), the first
    and last token of the answer, both 0 if the window lacks the answer.

    `questions` includes the questions that are left out of training. `features` has the windows,
    with the mapping from tokens back to text.
    """

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        vocabulary: Vocabulary,
        cased: bool,
        windows: Windows,
        training: bool,
    ) -> None:
        """Makes the windows, and notes on questions that cannot be trained on or scored."""
        features = make_features(
            questions,
            vocabulary,
            cased=cased,
            training=training,
            max_length=windows.max_length,
            document_stride=windows.document_stride,
            max_query=windows.max_query,
        )
        # Identified by a hash of the content, because the vocabulary's file may be moved before the
        # run is resumed.
        digest = hashlib.sha256()
        for array in features.arrays.values():
            digest.update(array.tobytes())
        super().__init__(f"{name}:{digest.hexdigest()[:12]}", features.arrays, None)
        self.questions, self.features = tuple(questions), features
        self.vocabulary, self.cased = vocabulary, cased
        impossible = [q.id for q in questions if q.impossible and not training]
        bare = [q.id for q in questions if not (q.answers or q.impossible or training)]
        self.notes = tuple(
            f"{name}: {len(ids):,} of {len(questions):,} questions {text}; the first is {ids[0]}"
            for ids, text in (
                (
                    features.unmappable,
                    "are left out of training, because their answer is not in the context at the "
                    "position that the file gives",
                ),
                (
                    impossible,
                    "have no answer in their context, as in SQuAD v2, and count as wrong "
                    "unless config.task.version2=True allows the answer to be empty",
                ),
                (bare, "have no answer in the file, and count as wrong"),
            )
            if ids
        )


def load_squad(
    split: str, source_dir: str | None, options: SquadOptions, training: bool
) -> SquadSource:
    """Loads the questions of the file `split` in `source_dir`."""
    if source_dir is None:
        remedy = "give the folder of the JSON files, such as train-v1.1.json"
        raise UserError("config.data.dir", ..., "is missing", remedy)
    if not options.vocab:
        remedy = (
            "give a vocab.txt, or a folder with one, such as the workdir of the initial weights"
        )
        raise UserError("config.data.options.vocab", ..., "is missing", remedy)
    path = pathlib.Path(source_dir, split)
    if not path.is_file():
        present = sorted(file.name for file in path.parent.glob("*.json"))
        there = f"which has {', '.join(present)}" if present else "which has no JSON file yet"
        remedy = f"set the split to the name of a file in config.data.dir, {there}"
        raise UserError(path, ..., "is not a file", remedy)
    vocabulary, cased = saved.read(options.vocab)
    if cased is not None and cased != options.cased:
        problem = f"differs from the vocabulary {options.vocab}"
        remedy = f"use {cased}, as the file beside it says"
        raise UserError("config.data.options.cased", options.cased, problem, remedy)
    return SquadSource(
        name=f"squad:{split}",
        questions=read_questions(path),
        vocabulary=vocabulary,
        cased=options.cased,
        windows=options,
        training=training,
    )
