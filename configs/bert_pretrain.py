r"""BERT pre-training with LAMB: 128 tokens, then 512, as in Training BERT in 76 minutes.

Paper: arXiv:1904.00962. Its table 1 gives the F1 of SQuAD v1.1 of BERT-Large after the same 512 M
examples at every batch: 91.752 at 512 with 1,000,000 updates, 91.475 at 32,768 with 15,625, and
90.584 in 76.19 minutes on 1,024 TPU v3 chips with 65,536 and then 32,768 in 8,599 updates. Quoted
from the paper; not run here at that size, see experiments/bert for what was measured here.

Prepare the text first, each part in a folder of its own below one folder:

  python -m lamb_tpu.data.prepare_text --input='books/*.md' --vocab=vocab.txt --output=DATA/train
  python -m lamb_tpu.data.prepare_text --input=held_out.txt --vocab=vocab.txt \
      --output=DATA/validation

Then both phases, one after the other, the second from the weights of the first:

  python -m lamb_tpu.train --config=configs/bert_pretrain.py --workdir=DIR --config.data.dir=DATA
  python -m lamb_tpu.train --config=configs/bert_pretrain.py:recipe=mixed --workdir=DIR \
      --config.data.dir=DATA
  python -m lamb_tpu.train --config=configs/bert_pretrain.py:size=small,batch=512 --workdir=DIR \
      --config.data.dir=DATA

Hardware of the papers: recipe=paper 16 TPU v3 chips (batch 512) to 1,024 (32,768); wall times in
the table. `phase=1` and `phase=2` select one phase, for evaluating, planning, or a second phase
from other weights by --config.init_from=DIR.

Recipes (`recipe=`):
  paper     the untuned rule: 5e-3 at 32,768, scaled by the square root of the batch; warm-up over a
            fifth of each phase at 32,768, as many updates at other batches (so 1/320 at 512).
            Phases of 90 and 10 % of the examples. Linear decay, counted from update 0, as in the
            published `create_optimizer` of google-research/bert's optimization.py and of the first
            author's LAMB (fastalgo/mnist_tpu, lamb/optimization.py): at the end of warm-up the rate
            falls from 5e-3 to 4e-3. The decay from the end of warm-up would sum to 19 % more.
  mixed     65,536 for 7,038 updates, then 32,768 for 1,561. The paper does not give its rates; here
            they follow the same rule.
  nvidia    NVIDIA's PyTorch example: 6e-3 and 4e-3, 28.43 and 12.8 % of warm-up, a square-root
            decay that also counts from update 0, and a schedule that starts at step 1.
  deepspeed DeepSpeed's 44 minutes: DeepSpeedExamples/bing_bert, bert_large_lamb.json, the two
            scripts and deepspeed_train.py. 1e-3 plus 1.1e-2, then 2e-3; quadratic warm-up of 450
            updates (6 % of 7,500; bert-pretraining.md says 2 %) and 150, smooth exponential decay;
            ratios between 0.01 and 0.3, for biases and LayerNorm too; eps 1e-8. Numbers of examples
            as in bert-pretraining.md, with the second phase up to its last checkpoint. The pooler
            is not trained there; here it is.
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
    # Devlin et al., arXiv:1810.04805: 1e-4 at 256, linear decay; the paper's baseline is at 512.
    "adamw": {
        "name": "adamw",
        "learning_rate": 1e-4,
        "b2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "clip_global_norm": 1.0,
    },
    # DeepSpeed's recipe of 1-bit LAMB has bounds, freeze_step and clipping; the rest is LAMB's.
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
# 15,625 updates of 32,768: nine tenths at 128 tokens and one tenth at 512.
_EXAMPLES = (14_063 * 32_768, 1_562 * 32_768)
# create_optimizer of google-research/bert and of the LAMB authors: the decay counts from update 0.
_LINEAR = {"decay": "polynomial", "power": 1.0, "decay_from": "zero"}


# One rule for every batch: `_phase` gives the rate and warm-up at 32,768, and LEGW scales both.
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
# deepspeed_train.py --lr_schedule EE: warmup_exp_decay_exp, of degree 2.
_DEEPSPEED = {"decay": "exponential", "decay_factor": 0.9, "staircase": False, "warmup_power": 2.0}
# Both phases of each recipe; rates and warm-ups of nvidia and deepspeed belong to their batches.
RECIPES = {
    "mixed": _untuned((65_536, 32_768), (7_038 * 65_536, 1_561 * 32_768)),
    # DeepLearningExamples, schedulers.py: PolyWarmUpScheduler counts from 1, in either phase.
    "nvidia": (
        _phase(65_536, "7038 steps", 6e-3, "28.43 percent", **_NVIDIA),
        _phase(32_768, "1563 steps", 4e-3, "12.8 percent", **_NVIDIA),
    ),
    "deepspeed": (
        # --lr_offset 10e-4 is added to the whole schedule: to its start, peak and end.
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
# LAMB's settings that differ from the paper's authors'. NVIDIA's run has apex's FusedLAMB, which
# corrects the moments' bias. DeepSpeed's are from deepspeed_bsz64k_lamb_config_seq128.json, and eps
# from FusedLamb, whose kernel also adapts parameters that do not decay.
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
    """Arguments: size=large, recipe=paper, batch=32768 (of paper), optimizer=lamb|adamw|
    onebit_lamb (several devices), phase=0 (both) | 1 | 2, scan (layers in a loop: compiles faster,
    runs slower), smoke.
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
            f"the config's argument batch={arg.batch} is for recipe=paper; {arg.recipe} has its "
            "own, which --config.phases.phase_1.batch_size changes"
        )
    config = base_config()
    config.data.name = "masked_lm"
    config.data.train_split, config.data.eval_split = "train", "validation"
    # Masks are drawn anew in every epoch; the other values are those of create_pretraining_data.py.
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
    # Threefry is slow on a TPU: with its masks of dropout, BERT-Large at 65,536 takes 321 ms a step
    # on 2,048 cores of v3, with rbg's 232 ms, by the compiler's estimate.
    config.prng = "rbg"
    config.parallel.backend = "shard_map"
    # Split over 2,048 cores of TPU v3 the state would cost 59 ms an update, by the compiler's
    # estimate, and it fits without that.
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
                f"the config's argument recipe={arg.recipe} has settings of LAMB alone; with "
                "optimizer=onebit_lamb it must be paper"
            )
        config.optimizer.collect = True
        config.parallel.exchange = ConfigDict({"name": "onebit"})
    elif arg.optimizer == "lamb":
        # Trust ratios and norms of every layer stay in the state, to be recorded.
        config.optimizer.collect = True
        config.optimizer.update(_LAMB.get(arg.recipe, {}))
        if arg.recipe == "deepspeed":
            config.optimizer.rules = PARAMETERS_ADAPTED_SCANNED if arg.scan else PARAMETERS_ADAPTED
    else:
        # The baseline's schedule: one rate for every batch, unless --config.schedule.scaling asks.
        config.schedule.base_batch_size = 512
        phases = tuple(
            _phase(
                phase.batch_size, phase.duration, 1e-4, "1 percent", scaling="identity", **_LINEAR
            )
            for phase in phases
        )
    sequences = (
        # Places for 15 % of the tokens, 19.2 of 128 and 76.8 of 512, rounded up as in the papers.
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
        # The phase has keys that the config lacks, such as `sequence_length`.
        with config.unlocked():
            config.update(phases[arg.phase - 1])
        return config
    config.phases = ConfigDict({"phase_1": phases[0], "phase_2": phases[1]})
    return config


def _smoke(config: ConfigDict) -> None:
    """A network of two layers on the text that comes with Python, in float32."""
    config.data.name = "python_docs"
    config.data.train_split, config.data.eval_split = "train", "test"
    config.data.options = ConfigDict({"vocab_size": 2048})
    config.model.update({**SIZES["tiny"], "vocab_size": 2048, "dtype": "float32"})
    config.eval.every = "100 percent"
    config.log.every = "5 steps"
    if config.optimizer.name == "onebit_lamb":
        config.optimizer.freeze_step = 6
