"""Writes a run's BERT as a folder that Hugging Face's transformers reads.

  python -m lamb_tpu.export --workdir=DIR --output=FOLDER

FOLDER receives config.json, model.safetensors, and where the run was on text vocab.txt and
tokenizer_config.json. It is of the newest checkpoint that can be read, or of --step.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_string("output", None, "Folder to write.")
    flags.DEFINE_integer("step", None, "Completed updates of the checkpoint; default the newest.")
    cli.answer_help()

import json
import os
import pathlib

from lamb_tpu import filesystem
from lamb_tpu.data.text import saved
from lamb_tpu.errors import UserError
from lamb_tpu.models.bert_huggingface import to_huggingface
from lamb_tpu.weights import open_weights


def export(
    workdir: str | os.PathLike[str], output: str | os.PathLike[str], step: int | None = None
) -> str:
    """Writes the folder; tells what was written and where.

    Args:
      workdir: of a run with a BERT; with phases the last one's that has a checkpoint.
      output: made if it is not there; nothing in it is replaced.
      step: completed updates; None for the newest checkpoint.

    Raises:
      UserError: no such checkpoint, a network that is no BERT or has heads that transformers does
        not know together, or a folder that holds something.
    """
    weights = open_weights(os.fspath(workdir), "--workdir", step)
    config, text = weights.bert(), weights.text()
    if config is None:
        raise UserError(
            f"--workdir {weights.folder} has the model {weights.model['name']!r}; only 'bert' can "
            "be written"
        )
    folder = pathlib.Path(output).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; give a folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--output {folder} holds something already; give a new or empty folder")
    with filesystem.writing("--output", folder):
        to_huggingface(config, weights.params(), folder)
        if text is not None:
            vocabulary, cased = text
            vocabulary.write(folder / saved.VOCABULARY)
            settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": not cased}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return f"{weights.describe()} is written to {folder}"


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    print(export(values.workdir, values.output, values.step))


if __name__ == "__main__":
    cli.run_main(main, required=("workdir", "output"))
