r"""Question answering on SQuAD v1.1, from a pre-trained BERT.

Source of the rates: a comment in the LAMB authors' code (github.com/fastalgo/davidnet-cifar): 3e-5,
4e-5 or 5e-5 for AdamW on SQuAD 1.1, and 3e-4, 4e-4 or 5e-4 for LAMB at batch 64. Two epochs, windows
of 384 tokens with a stride of 128, and warm-up over a tenth of the run are from run_squad.py of
google-research/bert. The linear decay counts from update 0, as in `create_optimizer` of that
repository's optimization.py and of the LAMB authors' version of optimization.py. Paper of the data
set: arXiv:1606.05250. Expected metric: after the LAMB paper's pre-training at batch 32,768,
BERT-Large reaches an F1 of 91.475 (quoted from that paper, arXiv:1904.00962; not run here). Small
networks were measured here, in experiments/bert.

  python -m lamb_tpu.train --config=configs/bert_squad.py --workdir=DIR \
      --config.data.dir=SQUAD --config.init_from=PRETRAINED
  python -m lamb_tpu.train --config=configs/bert_squad.py:size=base,optimizer=adamw \
      --workdir=DIR --config.data.dir=SQUAD --config.init_from=PRETRAINED
  python -m lamb_tpu.train --config=configs/bert_squad.py --workdir=DIR \
      --config.data.dir=SQUAD --config.init_from=PRETRAINED --config.task.version2=True \
      --config.data.train_split=train-v2.0.json --config.data.eval_split=dev-v2.0.json

SQUAD is the folder with train-v1.1.json and dev-v1.1.json. PRETRAINED is the workdir of a run of
configs/bert_pretrain.py, or a folder that Hugging Face's transformers wrote, including vocab.txt. The
run writes predictions.json for the official script into DIR, and records exact match and F1.
Hardware and wall time: not known, because this size was not run.
"""

from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument
from lamb_tpu.models.bert import SIZES
from lamb_tpu.models.bert_rules import PARAMETERS

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lamb": {"name": "lamb", "preset": "author", "learning_rate": 4e-4},
    "adamw": {
        "name": "adamw",
        "learning_rate": 4e-5,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "clip_global_norm": 1.0,
    },
}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: size=large, optimizer=lamb|adamw, batch=64, smoke."""
    arg = parse_argument(argument, size="large", optimizer="lamb", batch=64, smoke=False)
    for key, known in (("size", SIZES), ("optimizer", OPTIMIZERS)):
        check_argument(key, arg[key], known)
    config = base_config()
    config.batch_size = arg.batch
    config.duration = "2 epochs"
    config.data.name = "squad"
    config.data.train_split, config.data.eval_split = "train-v1.1.json", "dev-v1.1.json"
    config.data.options = ConfigDict(
        {"vocab": "", "cased": False, "max_length": 384, "document_stride": 128, "max_query": 64}
    )
    config.task = ConfigDict(
        {"name": "question_answering", "version2": False, "null_threshold": 0.0}
    )
    # 512 positions for windows of 384 tokens, because the pre-trained network has 512.
    config.model = ConfigDict(
        {
            "name": "bert",
            **SIZES[arg.size],
            "vocab_size": 30_522,
            "max_positions": 512,
            "heads": ("span",),
            "gelu": "tanh",
            "dropout_rate": 0.1,
            "attention_dropout_rate": 0.1,
            "dtype": "bfloat16",
        }
    )
    config.optimizer = ConfigDict({**OPTIMIZERS[arg.optimizer], "rules": PARAMETERS})
    config.schedule.base_batch_size = 64
    config.schedule.scaling = "sqrt" if arg.optimizer == "lamb" else "identity"
    config.schedule.warmup = "10 percent"
    config.schedule.decay = "polynomial"
    config.schedule.decay_from = "zero"
    # The pre-trained network has no head for answers.
    config.init.new_parameters = "^span/"
    config.prng = "rbg"
    config.eval.batch_size = 128
    config.eval.every = "1 epochs"
    config.checkpoint.every = "500 steps"
    if arg.smoke:
        config.data.name = "python_docs_cloze"
        config.data.train_split, config.data.eval_split = "train", "test"
        config.data.options = ConfigDict(
            {"vocab_size": 2048, "max_length": 128, "document_stride": 32, "max_query": 48}
        )
        config.model.update({**SIZES["tiny"], "vocab_size": 2048, "dtype": "float32"})
        # The smoke run starts from random weights, so it uses a pre-training learning rate.
        config.optimizer.learning_rate = 5e-3
        config.batch_size = 32
        config.duration = "60 steps"
        config.eval.every = "100 percent"
        config.log.every = "5 steps"
    return config
