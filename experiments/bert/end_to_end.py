"""From text to a SQuAD score: a small BERT pre-trained in two phases, against random weights.

  python -m experiments.bert.end_to_end --data_dir=DATA --squad_dir=SQUAD --runs=DIR

Pre-trains a BERT of 4 layers in both phases of configs/bert_pretrain.py (128 tokens, then 512) in
DIR/pretrained, fine-tunes it by configs/bert_squad.py from there and from random weights, at the
same rates, and writes exact match and F1 of all into experiments/bert/end_to_end.md. DATA holds the
folders `train` and `validation` that `python -m lamb_tpu.data.prepare_text` made, SQUAD the files
of SQuAD v1.1. Every run is resumable; complete ones are not run again.
"""

import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from configs import bert_pretrain, bert_squad
from experiments.records import Record, evaluations, facts, integers, machines, versions
from lamb_tpu import cli
from lamb_tpu.config import differences, flatten
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
STARTS = ("pretrained", "random")
TOKENS, BATCHES = (128, 512), (64, 32)  # of the two phases of pre-training
WINDOW = 256  # tokens of fine-tuning


class Run(NamedTuple):
    """One fine-tuning."""

    start: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's workdir."""
        return "-".join(map(str, self))


def _shrink(config: ConfigDict, hidden_size: int) -> None:
    """Makes the network one of 4 layers, in float32."""
    config.model.update({
        "hidden_size": hidden_size, "num_heads": hidden_size // 64,
        "intermediate_size": 4 * hidden_size, "dtype": "float32",
    })


def pretrain_config(data_dir: str, examples: int, hidden_size: int, vocab_size: int) -> ConfigDict:
    """Both phases: `examples` of 128 tokens at batch 64, a twelfth of them of 512 at batch 32."""
    config = bert_pretrain.get_config("size=mini")
    config.data.dir = data_dir
    # As in scaling.py.
    config.data.options.next_sentence = False
    config.model.update({
        "heads": ("mlm",), "dropout_rate": 0.0, "attention_dropout_rate": 0.0,
        "vocab_size": vocab_size,
    })
    config.optimizer.b2 = 0.98
    _shrink(config, hidden_size)
    config.eval.batch_size = 64
    config.eval.every = "50 percent"
    config.log.every = "20 steps"
    config.checkpoint.every = "5 percent"
    config.schedule.base_batch_size = 64
    first, second = config.phases.phase_1, config.phases.phase_2
    first.update({"batch_size": BATCHES[0], "duration": f"{examples} examples"})
    second.update({"batch_size": BATCHES[1], "duration": f"{examples // 12} examples"})
    for phase, rate in ((first, 0.01), (second, 0.005)):
        phase.optimizer.learning_rate = rate
        phase.schedule.warmup = "5 percent"
        phase.schedule.decay_from = "warmup"
    return config


def squad_config(
    squad_dir: str, train_file: str, run: Run, pretrained: pathlib.Path, epochs: float
) -> ConfigDict:
    """Fine-tuning in windows of 256 tokens."""
    config = bert_squad.get_config("size=mini,batch=32")
    config.seed = run.seed
    config.data.dir = squad_dir
    config.data.train_split = train_file
    config.data.options.update({"max_length": WINDOW, "document_stride": 96, "max_query": 32})
    before = json.loads((pretrained / "phase_2" / "config.json").read_text())
    config.data.options.vocab = str(pretrained / "phase_2" / "vocab.txt")
    config.model.vocab_size = before["model.vocab_size"]
    _shrink(config, before["model.hidden_size"])
    config.duration = f"{epochs} epochs"
    config.eval.every = "100 percent"
    config.optimizer.learning_rate = run.rate
    config.schedule.base_batch_size = 32
    config.schedule.decay_from = "warmup"
    config.checkpoint.every = "10 percent"
    if run.start == "pretrained":
        config.init_from = str(pretrained)
    return config


def is_complete(config: ConfigDict, folder: pathlib.Path, epochs: float) -> bool:
    """Returns whether the workdir holds this fine-tuning, complete and scored."""
    found = evaluations(folder)
    if not found or found[-1]["epoch"] < epochs:
        return False
    before = json.loads((folder / "config.json").read_text())
    return not differences(before, flatten(config))


def collect(runs: pathlib.Path, wanted: Iterable[Run]) -> list[Record]:
    """One record for each run of `wanted` below `runs`, all of them complete."""
    records = []
    for run in wanted:
        folder = runs / run.name
        last = evaluations(folder)[-1]
        records.append({
            "kind": "fine-tuning", **run._asdict(), "updates": last["step"],
            "exact_match": last["exact_match"], "f1": last["f1"],
            "loss": read_records(folder / "metrics.jsonl", "train")[-1]["loss"],
            **facts(folder),
        })
    return records


def page(records: Iterable[Record]) -> str:
    """The Markdown page: of records by their `kind`, "settings", "phase" and "fine-tuning"."""
    records = list(records)
    settings, = (record for record in records if record["kind"] == "settings")
    phases = [record for record in records if record["kind"] == "phase"]
    tuned = [record for record in records if record["kind"] == "fine-tuning"]
    lines = [
        "# From text to SQuAD with a small BERT",
        "",
        f"4 layers, {settings['hidden_size']} units, vocabulary of {settings['vocabulary']:,},",
        "float32. Pre-trained with LAMB on books in the public domain in two phases of full",
        f"sentences, {settings['examples']:,} of {TOKENS[0]} tokens at batch {BATCHES[0]} and a",
        f"twelfth as many of {TOKENS[1]} at batch {BATCHES[1]}; fine-tuned with LAMB on questions",
        f"of SQuAD v1.1, windows of {WINDOW} tokens; measured on its whole development set.",
        "Every decay counts from the end of its warm-up, which configs/bert_pretrain.py and",
        "bert_squad.py have since counted from update 0.",
        "",
    ]
    if phases:
        lines += [
            "| phase | tokens | batch | updates | held-out masked-word loss | accuracy | minutes |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(
                f"| {p['phase']} | {p['tokens']} | {p['batch']} | {p['updates']:,} | "
                f"{p['mlm_loss']:.3f} | {p['mlm_accuracy']:.2%} | {p['seconds'] / 60:.0f} |"
                for p in phases
            ),
        ]
    else:
        lines.append("What the two phases came to on held-out text was not kept.")
    lines += [
        "",
        "| fine-tuned from | rate | exact match | F1 | F1 by seed | updates | minutes a run |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for start, rate in dict.fromkeys((r["start"], r["rate"]) for r in tuned):
        found = [r for r in tuned if (r["start"], r["rate"]) == (start, rate)]
        by_seed = ", ".join(f"{r['seed']}: {r['f1']:.2f}" for r in found)
        lines.append(
            f"| {start} | {rate} | {statistics.mean(r['exact_match'] for r in found):.2f} | "
            f"{statistics.mean(r['f1'] for r in found):.2f} | {by_seed} | {found[0]['updates']:,} "
            f"| {statistics.mean(r['seconds'] for r in found) / 60:.0f} |"
        )
    return "\n".join([
        *lines, "", f"Machine: {machines(tuned)}. Versions: {versions(tuned)}. Command: "
        f"`{settings['command']}`. Records: end_to_end.jsonl.", "",
    ])


def phase_records(pretrained: pathlib.Path) -> list[Record]:
    """Returns the records of the pre-training's phases."""
    records = []
    for folder in sorted(pretrained.glob("phase_*")):
        config = json.loads((folder / "config.json").read_text())
        last = evaluations(folder)[-1]
        records.append({
            "kind": "phase", "phase": folder.name, "tokens": config["data.options.sequence_length"],
            "batch": config["batch_size"], "updates": last["step"],
            **{key: last[key] for key in ("mlm_loss", "mlm_accuracy")},
            "seconds": facts(folder)["seconds"],
        })
    return records


def main() -> None:
    """Runs what is missing and writes the page."""
    values = flags.FLAGS
    runs = pathlib.Path(values.runs).expanduser().absolute()
    for name in ("data_dir", "squad_dir"):
        if values[name].value is None:
            raise UserError(f"--{name} is missing; see --help")
    # Everything that fine-tuning needs is checked before hours of pre-training.
    try:
        rates = [float(rate) for rate in values.rates]
    except ValueError:
        raise UserError(
            f"--rates is {','.join(values.rates)!r}; it must be numbers, such as 0.001,0.004"
        ) from None
    wanted = [
        Run(start, rate, seed)
        for seed in integers("seeds") for rate in rates for start in STARTS
    ]
    for name in (values.train_file, "dev-v1.1.json"):
        if not (pathlib.Path(values.squad_dir).expanduser() / name).is_file():
            raise UserError(f"--squad_dir {values.squad_dir} has no {name}")
    pretrained = runs / "pretrained"
    vocabulary = Vocabulary.read(pathlib.Path(values.data_dir) / "train" / "vocab.txt")
    config = pretrain_config(
        values.data_dir, values.examples, values.hidden_size, len(vocabulary)
    )
    train(config, pretrained, label="pre-training")
    for run in wanted:
        config = squad_config(
            values.squad_dir, values.train_file, run, pretrained, values.epochs
        )
        # A complete one would be scored once more, which takes minutes.
        if not is_complete(config, runs / run.name, values.epochs):
            train(config, runs / run.name, label=run.name)
    given = " ".join(
        f"--{name}={values[name].value}"
        for name in ("train_file", "examples", "hidden_size", "epochs")
    )
    settings = {
        "kind": "settings", "hidden_size": values.hidden_size, "vocabulary": len(vocabulary),
        "examples": values.examples,
        "command": "python -m experiments.bert.end_to_end --data_dir=DATA --squad_dir=SQUAD "
        f"{given} --rates={','.join(values.rates)} --seeds={','.join(values.seeds)}",
    }
    records = [settings, *phase_records(pretrained), *collect(runs, sorted(wanted))]
    (FOLDER / "end_to_end.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    text = page(records)
    (FOLDER / "end_to_end.md").write_text(text)
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/bert_end_to_end", "Folder of the runs.")
    flags.DEFINE_string("data_dir", None, "Folder with the prepared texts train and validation.")
    flags.DEFINE_string("squad_dir", None, "Folder with SQuAD v1.1's files.")
    flags.DEFINE_string("train_file", "train-v1.1.json", "The questions to train on.")
    flags.DEFINE_integer("examples", 98_304, "Examples of the first phase.", lower_bound=1536)
    flags.DEFINE_integer("hidden_size", 256, "Units, of 64 a head.", lower_bound=64)
    flags.DEFINE_list("rates", ["0.001", "0.004"], "Of the fine-tuning, each from both starts.")
    flags.DEFINE_float("epochs", 2.0, "Of the fine-tuning.", lower_bound=0.01)
    flags.DEFINE_list("seeds", ["0"], "Seeds of the fine-tuning.")
    cli.run_main(main)
