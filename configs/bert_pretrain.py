r"""BERT pre-training with LAMB at 128 and then 512 tokens, as in 'Training BERT in 76 minutes'.

Paper: arXiv:1904.00962. Its table 1 gives the SQuAD v1.1 F1 of BERT-Large after 512 M examples:
91.752 with batch 512 and 1,000,000 updates; 91.475 with batch 32,768 and 15,625 updates; and 90.584
with batch 65,536, then 32,768, and 8,599 updates in all, in 76.19 minutes on 1,024 TPU v3 chips. These
results are quoted from the paper; they were not measured here. experiments/bert has our results.

Prepare the text first, each split in a separate folder below DATA:

  python -m lamb_tpu.prepare_text --input='books/*.md' --vocab=vocab.txt --output=DATA/train
  python -m lamb_tpu.prepare_text --input=held_out.txt --vocab=vocab.txt \
      --output=DATA/validation

Then run both phases; the second starts from the weights of the first:

  python -m lamb_tpu.train --config=configs/bert_pretrain.py --workdir=DIR --config.data.dir=DATA
  python -m lamb_tpu.train --config=configs/bert_pretrain.py:recipe=mixed --workdir=DIR \
      --config.data.dir=DATA
  python -m lamb_tpu.train --config=configs/bert_pretrain.py:size=small,batch=512 --workdir=DIR \
      --config.data.dir=DATA

Hardware of the paper for recipe=paper: from 16 TPU v3 chips (batch 512) to 1,024 (batch 32,768). The
paper's table has the wall times. `phase=1` and `phase=2` select a single phase, for example to evaluate or
plan it, or to start the second phase from other weights with --config.init_from=DIR.

Recipes (`recipe=`):
  paper     The paper's untuned rule: a learning rate of 5e-3 at batch 32,768, scaled by the square
            root of the batch size. The warm-up takes a fifth of each phase at 32,768, and the same
            number of updates at other batch sizes (1/320 of the phase at 512). The phases have 90
            and 10 % of the examples. The linear decay counts from update 0, as in
            `create_optimizer` of google-research/bert's optimization.py and of the first author's
            LAMB (fastalgo/mnist_tpu, lamb/optimization.py): at the end of the warm-up, the rate
            drops from 5e-3 to 4e-3. If the decay began at the end of the warm-up, the sum of the
            rates would be 19 % larger.
  mixed     Batch 65,536 for 7,038 updates, then 32,768 for 1,561. The paper does not give the rates
            of this run; here the rates follow the rule of recipe=paper.
  nvidia    NVIDIA's PyTorch example: rates 6e-3 and 4e-3, warm-ups of 28.43 and 12.8 %, a
            square-root decay that also counts from update 0, and a schedule that starts at step 1.
  deepspeed DeepSpeed's run of 44 minutes, from DeepSpeedExamples/bing_bert: bert_large_lamb.json, the
            two scripts and deepspeed_train.py. Peak rates of 1e-3 plus 1.1e-2, then 2e-3; quadratic
            warm-ups of 450 updates (6 % of 7,500; bert-pretraining.md says 2 %), then 150; smooth
            exponential decay; trust ratios between 0.01 and 0.3, also for biases and LayerNorm; eps
            1e-8. The numbers of examples are those of bert-pretraining.md; the second phase ends at
            DeepSpeed's last checkpoint. Unlike in DeepSpeed's recipe, the pooler is trained.
"""

from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.config import base_config, check_argument, parse_argument
from lamb_tpu.errors import UserError
from lamb_tpu.models.bert import SIZES
from lamb_tpu.models.bert_rules import (
    PARAMETERS,
    PARAMETERS_ADAPTED,
    PARAMETERS_ADAPTED_SCANNED,
    PARAMETERS_SCANNED,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lamb": {"name": "lamb", "preset": "author", "learning_rate": 5e-3, "b2": 0.999},
    # Devlin et al., arXiv:1810.04805: 1e-4 at batch 256, linear decay; the LAMB paper's baseline has 512.
    "adamw": {
        "name": "adamw",
        "learning_rate": 1e-4,
        "b2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "clip_global_norm": 1.0,
    },
    # Bounds, freeze_step and clipping are from DeepSpeed's recipe for 1-bit LAMB; the rest is LAMB's.
    "onebit_lamb": {
        "name": "onebit_lamb",
        "learning_rate": 5e-3,
        "b2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "clip_global_norm": 1.0,
        "ratio_bounds": (0.01, 0.3),
        "freeze_step": 1000,
    },
}
# Examples of 15,625 updates of 32,768: nine tenths at 128 tokens and one tenth at 512.
_EXAMPLES = (14_063 * 32_768, 1_562 * 32_768)
# The decay counts from update 0, as in create_optimizer of google-research/bert and of the LAMB authors.
_LINEAR = {"decay": "polynomial", "power": 1.0, "decay_from": "zero"}


# The same rule for every batch: `_phase` sets the rate and warm-up for 32,768, and LEGW scales them.
def _untuned(batches: tuple[int, int], examples: tuple[int, int]) -> tuple[ConfigDict, ...]:
    return tuple(
        _phase(batch, f"{number} examples", 5e-3, "20 percent", scaling="legw", **_LINEAR)
        for batch, number in zip(batches, examples)
    )


def _phase(
    batch: int, duration: str, learning_rate: float, warmup: str, **schedule: Any
) -> ConfigDict:
    return ConfigDict(
        {
            "batch_size": batch,
            "duration": duration,
            "optimizer": {"learning_rate": learning_rate},
            "schedule": {"warmup": warmup, **schedule},
        }
    )


_NVIDIA = {"decay": "polynomial", "power": 0.5, "decay_from": "zero", "first_step": 1}
# deepspeed_train.py --lr_schedule EE: warmup_exp_decay_exp with degree 2.
_DEEPSPEED = {"decay": "exponential", "decay_factor": 0.9, "staircase": False, "warmup_power": 2.0}
# Both phases of each recipe. Rates and warm-ups of nvidia and deepspeed suit only these batch sizes.
RECIPES = {
    "mixed": _untuned((65_536, 32_768), (7_038 * 65_536, 1_561 * 32_768)),
    # DeepLearningExamples, schedulers.py: PolyWarmUpScheduler counts from 1 in both phases.
    "nvidia": (
        _phase(65_536, "7038 steps", 6e-3, "28.43 percent", **_NVIDIA),
        _phase(32_768, "1563 steps", 4e-3, "12.8 percent", **_NVIDIA),
    ),
    "deepspeed": (
        # --lr_offset 10e-4 is added to the entire schedule: its start, peak and end.
        _phase(
            65_536,
            "403_000_000 examples",
            1.1e-2 + 1e-3,
            "450 steps",
            **_DEEPSPEED,
            decay_every="250 steps",
            start_factor=1e-3 / 1.2e-2,
            end_factor=1e-3 / 1.2e-2,
        ),
        _phase(
            32_768, "22_000_000 examples", 2e-3, "150 steps", **_DEEPSPEED, decay_every="150 steps"
        ),
    ),
}
# LAMB's settings that differ from those of the paper's authors. NVIDIA uses apex's FusedLAMB, which
# corrects the moments' bias. DeepSpeed's settings are from deepspeed_bsz64k_lamb_config_seq128.json,
# with the eps of FusedLamb. FusedLamb's kernel also adapts parameters without decay.
_LAMB: dict[str, dict[str, Any]] = {
    "nvidia": {"preset": "apex"},
    "deepspeed": {
        "preset": "deepspeed",
        "bias_correction": "none",
        "weight_decay": 0.01,
        "clip_global_norm": 1.0,
        "ratio_bounds": (0.01, 0.3),
    },
}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments: size=large, recipe=paper, batch=32768 (for recipe=paper), optimizer=lamb|adamw|
    onebit_lamb (needs several devices), phase=0 (both) | 1 | 2, scan (layers in a loop: compiles
    faster, runs slower), smoke.
    """
    arg = parse_argument(
        argument,
        size="large",
        recipe="paper",
        batch=32_768,
        optimizer="lamb",
        phase=0,
        scan=False,
        smoke=False,
    )
    for key, known in (
        ("size", SIZES),
        ("recipe", ("paper", *RECIPES)),
        ("optimizer", OPTIMIZERS),
        ("phase", (0, 1, 2)),
    ):
        check_argument(key, arg[key], known)
    if arg.recipe != "paper" and arg.batch != 32_768:
        raise UserError(
            "the config's argument batch",
            arg.batch,
            f"has no effect with recipe={arg.recipe}",
            "set --config.phases.phase_1.batch_size instead, or use recipe=paper",
        )
    config = base_config()
    config.data.name = "masked_lm"
    config.data.train_split, config.data.eval_split = "train", "validation"
    # Masks are drawn again in every epoch; the other values are from create_pretraining_data.py.
    config.data.options = ConfigDict(
        {
            "next_sentence": True,
            "whole_words": False,
            "dupe_factor": 0,
            "short_probability": 0.1,
            "mask_probability": 0.15,
        }
    )
    config.task = ConfigDict({"name": "masked_lm"})
    config.model = ConfigDict(
        {
            "name": "bert",
            **SIZES[arg.size],
            "vocab_size": 30_522,
            "max_positions": 512,
            "heads": ("mlm", "nsp"),
            "gelu": "tanh",
            "dropout_rate": 0.1,
            "attention_dropout_rate": 0.1,
            "initializer_range": 0.02,
            "dtype": "bfloat16",
            "scan_layers": arg.scan,
            "remat": "none",
        }
    )
    rules = PARAMETERS_SCANNED if arg.scan else PARAMETERS
    config.optimizer = ConfigDict({**OPTIMIZERS[arg.optimizer], "rules": rules})
    config.schedule.base_batch_size = 32_768
    # Threefry is slow on a TPU: a step of BERT-Large at batch 65,536 on 2,048 cores of TPU v3 takes
    # 321 ms with dropout masks from threefry, and 232 ms from rbg, by the compiler's estimate.
    config.prng = "rbg"
    config.parallel.backend = "shard_map"
    # The state fits without sharding. Sharding it would cost 59 ms per update on 2,048 cores of TPU v3,
    # by the compiler's estimate.
    config.parallel.optimizer_state = "replicated"
    config.eval.batch_size = 1024
    config.eval.every = "10 percent"
    config.checkpoint.every = "500 steps"
    config.log.every = "20 steps"

    if arg.recipe == "paper":
        phases = _untuned((arg.batch, arg.batch), _EXAMPLES)
    else:
        phases = RECIPES[arg.recipe]
    if arg.optimizer == "onebit_lamb":
        if arg.recipe != "paper":
            raise UserError(
                "the config's argument recipe",
                arg.recipe,
                "has settings for LAMB only",
                "use recipe=paper with optimizer=onebit_lamb",
            )
        config.optimizer.collect = True
        config.parallel.exchange = ConfigDict({"name": "onebit"})
    elif arg.optimizer == "lamb":
        # Store the trust ratios and norms of every layer in the state, so that they are recorded.
        config.optimizer.collect = True
        config.optimizer.update(_LAMB.get(arg.recipe, {}))
        if arg.recipe == "deepspeed":
            config.optimizer.rules = PARAMETERS_ADAPTED_SCANNED if arg.scan else PARAMETERS_ADAPTED
    else:
        # The baseline's schedule has the same rate for every batch, unless
        # --config.schedule.scaling changes that.
        config.schedule.base_batch_size = 512
        phases = tuple(
            _phase(
                phase.batch_size, phase.duration, 1e-4, "1 percent", scaling="identity", **_LINEAR
            )
            for phase in phases
        )
    sequences = (
        # 15 % of the tokens are predicted: 19.2 of 128 and 76.8 of 512, rounded up as in the papers.
        {"sequence_length": 128, "max_predictions": 20},
        {"sequence_length": 512, "max_predictions": 80},
    )
    if arg.smoke:
        _smoke(config)
        sequences = (
            {"sequence_length": 64, "max_predictions": 10},
            {"sequence_length": 128, "max_predictions": 20},
        )
        phases = tuple(
            _phase(32, f"{steps} steps", 5e-3, "20 percent", **_LINEAR) for steps in (24, 12)
        )
    for phase, options in zip(phases, sequences):
        phase.data = ConfigDict({"options": options})
    if arg.phase:
        # Unlock, because the phase has new keys such as `sequence_length`.
        with config.unlocked():
            config.update(phases[arg.phase - 1])
        return config
    config.phases = ConfigDict({"phase_1": phases[0], "phase_2": phases[1]})
    return config


def _smoke(config: ConfigDict) -> None:
    """Changes the config to two layers on the text that comes with Python, in float32."""
    config.data.name = "python_docs"
    config.data.train_split, config.data.eval_split = "train", "test"
    config.data.options = ConfigDict({"vocab_size": 2048})
    config.model.update({**SIZES["tiny"], "vocab_size": 2048, "dtype": "float32"})
    config.eval.every = "100 percent"
    config.log.every = "5 steps"
    if config.optimizer.name == "onebit_lamb":
        config.optimizer.freeze_step = 6
