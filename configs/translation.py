r"""German to English translation with GNMT: Multi30k on a workstation, or WMT'16 as in the LEGW paper.

Paper: arXiv:1901.08256, LEGW, from batch 256 to 4,096 on WMT'16, 21.8 BLEU on newstest2016
(recalled, like the warm-up of 0.0145 epochs at batch 256). Network and attention follow MLPerf's
reference implementation of arXiv:1609.08144. That implementation's rate for Adam, its clipping at 5
and its four halvings of the rate over the last third are recalled. Multi30k (arXiv:1605.00459) is
the same study at a smaller scale: a smaller network and base batch 64. Adam's rate for Multi30k was
chosen by the BLEU on the validation split after a full run at batch 64 with one seed: 14.8 at 0.001
in float32, and in bfloat16 34.7 at 0.002, 36.3 at 0.004 and 34.9 at 0.008. LAMB's rates are guesses,
four times Adam's.

  python -m lamb_tpu.train --config=configs/translation.py --workdir=DIR \
      --config.data.dir=MULTI30K
  python -m lamb_tpu.train --config=configs/translation.py:batch=1024 --workdir=DIR \
      --config.data.dir=MULTI30K
  python -m lamb_tpu.train --config=configs/translation.py:data=wmt16,batch=4096 --workdir=DIR \
      --config.data.prepared_dir=TFDS

MULTI30K is the folder of the original files, train.de.gz and so on. TFDS is a folder in which
`tfds.builder('wmt16_translate/de-en', data_dir=TFDS, file_format='array_record')
.download_and_prepare()` has run once, on a machine with TensorFlow. The first run
prepares token ids below config.data.prepared_dir. With `smoke`, both values of `data` train a narrow
network on a bundled grammar.

`batch=` rescales the rate and warm-up by LEGW. The run writes translations.txt, and bleu.json with
sacrebleu's signature, into DIR. Hardware, wall time and BLEU: Multi30k was measured here, in
experiments/report/legw-multi30k.md; WMT'16 was not run.
"""

from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam"},
    "lamb": {"name": "lamb", "weight_decay": 0.0},
}
# Learning rates at the base batch.
RATES = {"multi30k": {"adam": 4e-3, "lamb": 16e-3}, "wmt16": {"adam": 1e-3, "lamb": 4e-3}}
# Base batch, duration, warm-up at the base batch, data options and network fields.
_DATA: dict[str, tuple[int, str, str, dict[str, Any], dict[str, Any]]] = {
    "multi30k": (
        64,
        "10 epochs",
        "0.1 epochs",
        {"vocab_size": 4000, "max_length": 48, "widths": 4},
        {"features": 128, "num_layers": 2, "dropout_rate": 0.2},
    ),
    "wmt16": (
        256,
        "2 epochs",
        "0.0145 epochs",
        {"vocab_size": 32_320, "max_length": 48, "widths": 3},
        {"features": 1024, "num_layers": 4, "dropout_rate": 0.2},
    ),
}


def _init_scale(features: int) -> float:
    """Returns MLPerf's 0.1 at width 1024, and more at smaller widths, so that attention learns in time."""
    return 0.1 * (1024 / features) ** 0.5


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: data=multi30k|wmt16, optimizer=adam|lamb, batch=0 (0: the base batch), smoke."""
    arg = parse_argument(argument, data="multi30k", optimizer="adam", batch=0, smoke=False)
    check_argument("data", arg.data, _DATA)
    check_argument("optimizer", arg.optimizer, OPTIMIZERS)
    base, duration, warmup, text, network = _DATA[arg.data]
    config = base_config()
    config.batch_size = arg.batch or base
    config.duration = duration
    config.data.name = arg.data
    config.data.eval_split = "validation"
    config.data.options = ConfigDict(text)
    config.task = ConfigDict(
        {
            "name": "translation",
            "label_smoothing": 0.1,
            "beam": 5,
            "length_penalty": 0.6,
            "coverage_penalty": 0.1,
            "max_length": 80,
        }
    )
    config.model = ConfigDict(
        {
            "name": "gnmt",
            "vocab_size": text["vocab_size"],
            **network,
            "dtype": "float32",
            "init_scale": _init_scale(network["features"]),
        }
    )
    config.optimizer = ConfigDict(
        {
            **OPTIMIZERS[arg.optimizer],
            "learning_rate": RATES[arg.data][arg.optimizer],
            "clip_global_norm": 5.0,
            "rules": "no_bias_no_norm",
        }
    )
    config.schedule.base_batch_size = base
    config.schedule.scaling = "legw"
    config.schedule.warmup = warmup
    config.schedule.decay = "step"
    config.schedule.decay_from = "zero"
    config.schedule.decay_factor = 0.5
    config.schedule.boundaries = "66.6 percent, 74.95 percent, 83.3 percent, 91.65 percent"
    config.eval.batch_size = 128
    config.log.every = "50 steps"
    if arg.smoke:
        config.data.name, config.data.eval_split = "grammar_de_en", "test"
        config.data.options = ConfigDict({"vocab_size": 325, "max_length": 12, "widths": 2})
        config.model.update(
            {"vocab_size": 325, "features": 64, "dropout_rate": 0.0, "init_scale": _init_scale(64)}
        )
        config.task.max_length = 24
        config.duration = "15 epochs"
        config.eval.every = "100 percent"
        config.log.every = "20 steps"
    return config
