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
class Options(Windows):
    """Options of the windows and of the tokenizer.

    Attributes:
      vocab: path of a `vocab.txt`, or of a folder with one.
      cased: whether the vocabulary keeps case and accents.
    """

    vocab: str = ""
    cased: bool = False


class SquadSource(ArraySource):
    """The windows over questions and their contexts, in the order of the questions.

    Fields of an example, with length L: `input_ids` and `token_type_ids` int32 (L,),
    `attention_mask` bool (L,); in training `start_position` and `end_position` int32 (), the first
    and last token of the answer, both 0 if the window does not have it.

    Attributes:
      questions: all questions, including those that are left out of training.
      features: the windows of the questions, with the way from tokens back to text.
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
        """Makes the windows, and notes about questions that cannot be trained on or scored.

        Raises:
          UserError: see `squad.make_features`.
        """
        features = make_features(
            questions,
            vocabulary,
            cased=cased,
            training=training,
            max_length=windows.max_length,
            document_stride=windows.document_stride,
            max_query=windows.max_query,
        )
        # The name has a hash of the content, because the vocabulary may move before a resume.
        digest = hashlib.sha256()
        for array in features.arrays.values():
            digest.update(array.tobytes())
        super().__init__(f"{name}:{digest.hexdigest()[:12]}", features.arrays, None)
        self.questions, self.features = tuple(questions), features
        self.vocabulary, self.cased = vocabulary, cased
        impossible = [q.id for q in questions if q.impossible and not training]
        bare = [q.id for q in questions if not (q.answers or q.impossible or training)]
        self.notes = tuple(
            f"{name}: {len(found):,} of {len(questions):,} questions {text}; the first is "
            f"{found[0]}"
            for found, text in (
                (
                    features.unmappable,
                    "are left out of training, for their answer does not stand "
                    "in the context where the file says",
                ),
                (
                    impossible,
                    "have no answer in their context, as SQuAD v2, and count as wrong "
                    "unless config.task.version2=True lets them be answered so",
                ),
                (bare, "have no answer in the file to be scored by, and count as wrong"),
            )
            if found
        )


def load_squad(split: str, folder: str | None, options: Options, training: bool) -> SquadSource:
    """Loads the questions of the file `split` in `folder`.

    Raises:
      UserError: a file is missing or is not of SQuAD, the vocabulary's case differs from the
        options, or `SquadSource` raises.
    """
    if folder is None:
        raise UserError(
            "config.data.dir is missing; for squad it is the folder of the JSON files, such as "
            "train-v1.1.json"
        )
    if not options.vocab:
        raise UserError(
            "config.data.options.vocab is missing; give the path of a vocab.txt, or of the folder "
            "that has one, such as the workdir whose weights the run starts from"
        )
    path = pathlib.Path(folder, split)
    if not path.is_file():
        there = ", ".join(sorted(found.name for found in path.parent.glob("*.json")))
        raise UserError(
            f"{path} is no file; a split of squad is the name of one in config.data.dir, which has "
            f"{there or 'no JSON file'}"
        )
    vocabulary, cased = saved.read(options.vocab)
    if cased is not None and cased != options.cased:
        raise UserError(
            f"config.data.options.cased is {options.cased}, but the vocabulary "
            f"{options.vocab} is of text with cased = {cased}, as the file beside it says"
        )
    questions = read_questions(path)
    return SquadSource(f"squad:{split}", questions, vocabulary, options.cased, options, training)
