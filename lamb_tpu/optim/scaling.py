"""Rules that adjust a tuned learning rate, warm-up or weight decay to another batch size."""

import math
from collections.abc import Callable
from typing import NamedTuple

from lamb_tpu.optim.checks import check_above_zero, check_range, is_number

SCALING_RULES: dict[str, Callable[[float], float]] = {
    "identity": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}

# Keys are names of optimizers in a config. The theory covers SGD, and optimizers with a second
# moment for every element. So LARS, NovoGrad, APOLLO, AdaGrad-Norm, Lion, Adafactor and Muon are
# left out.
RANDOM_MATRIX_RULES: dict[str, str] = {
    **dict.fromkeys(("sgd", "momentum", "nesterov"), "linear"),
    **dict.fromkeys(
        ("adam", "adamw", "adagrad", "diffgrad", "lamb", "rmsprop_tf", "schedule_free_adamw"),
        "sqrt",
    ),
}


class ScaledWarmup(NamedTuple):
    """The peak learning rate and warm-up length for a batch size, from `legw`."""

    learning_rate: float  # the peak
    warmup_epochs: float


def scale_learning_rate(
    rule: str, base_learning_rate: float, base_batch_size: int, batch_size: int
) -> float:
    """Scales a learning rate tuned at `base_batch_size` to `batch_size`.

    >>> scale_learning_rate('linear', 0.1, 256, 8192)
    3.2
    >>> round(scale_learning_rate('sqrt', 5e-3, 32768, 512), 6)  # BERT in the LAMB paper
    0.000625

    Args:
      rule: 'identity', 'linear' (Goyal et al., arXiv:1706.02677) or 'sqrt' (the LAMB and LEGW
        papers). `random_matrix_rule` returns 'linear' or 'sqrt' for an optimizer.
      base_learning_rate: the tuned rate, at least 0.
      base_batch_size: the batch size, in examples, at which the rate was tuned.
      batch_size: the batch size of the run, in examples.

    Raises:
      ValueError: the rule is unknown, the rate is negative, or a batch size is not positive.
    """
    if not isinstance(rule, str) or rule not in SCALING_RULES:
        raise ValueError(f"rule={rule!r} is unknown; use one of {', '.join(SCALING_RULES)}")
    check_range("base_learning_rate", base_learning_rate)
    return base_learning_rate * SCALING_RULES[rule](_batch_ratio(base_batch_size, batch_size))


def random_matrix_rule(optimizer: str) -> str:
    """Returns the scaling rule, 'linear' or 'sqrt', that random matrix theory implies.

    The largest eigenvalue of the batch's Hessian limits the stable learning rate, and small batches
    inflate this eigenvalue. Therefore the largest stable rate grows with the batch size: linearly
    for SGD, and like the square root for methods that divide by the root of second moments. In both
    cases the rate stops growing at large batches, where noise no longer dominates.

    >>> random_matrix_rule('momentum'), random_matrix_rule('adamw')
    ('linear', 'sqrt')

    LAMB has the rule 'sqrt', because its direction is Adam's.

    Raises:
      ValueError: the theory does not cover the optimizer.

    References:
      Granziol, Zohren, Roberts, Learning Rates as a Function of Batch Size, arXiv:2006.09092; only
      the abstract was read.
    """
    if not isinstance(optimizer, str) or optimizer not in RANDOM_MATRIX_RULES:
        raise ValueError(
            f"optimizer={optimizer!r} has no random-matrix rule, unlike "
            f"{', '.join(RANDOM_MATRIX_RULES)}; choose the rule 'linear' or 'sqrt' yourself"
        )
    return RANDOM_MATRIX_RULES[optimizer]


def legw(
    base_learning_rate: float, base_warmup_epochs: float, base_batch_size: int, batch_size: int
) -> ScaledWarmup:
    """Applies LEGW: with k times the batch, sqrt(k) times the rate and k times the warm-up epochs.

    The number of warm-up updates therefore does not change.

    >>> legw(4 / (2**3 * 100), 0.3125, 512, 32768)  # ResNet-50 in the LAMB paper
    ScaledWarmup(learning_rate=0.04, warmup_epochs=20.0)

    Args:
      base_learning_rate: the peak rate, tuned at `base_batch_size`.
      base_warmup_epochs: the warm-up at `base_batch_size`, in epochs; may be a fraction.
      base_batch_size: the batch size, in examples, at which the rate was tuned; above 0.
      batch_size: the batch size of the run, in examples, above 0.

    Raises:
      ValueError: the rate or the warm-up is negative, or a batch size is not positive.

    References:
      You et al., Large-Batch Training for LSTM and Beyond, arXiv:1901.08256.
    """
    check_range("base_warmup_epochs", base_warmup_epochs)
    return ScaledWarmup(
        scale_learning_rate("sqrt", base_learning_rate, base_batch_size, batch_size),
        base_warmup_epochs * _batch_ratio(base_batch_size, batch_size),
    )


def adamw_timescale(
    learning_rate: float, weight_decay: float, batch_size: float, data_size: float
) -> float:
    r"""Returns AdamW's timescale: the fraction of a run over which the weights average updates.

    Decoupled decay makes the weights an exponential moving average of updates. The timescale of
    this average, as a fraction of the run, is

    .. math:: \tau = \frac{B}{\eta \lambda D}

    >>> round(adamw_timescale(0.001, 0.1, batch_size=1_000_000, data_size=20e9), 6)
    0.5

    Args:
      learning_rate: :math:`\eta`, the peak rate.
      weight_decay: :math:`\lambda`, which AdamW multiplies by the learning rate, as `optax.adamw`
        does.
      batch_size: :math:`B`, in tokens or examples.
      data_size: :math:`D`, the amount of data in the full run, in the same unit as the batch size.

    Raises:
      ValueError: an argument is not a finite number above 0.

    References:
      Bergsma et al., Power Lines: Scaling Laws for Weight Decay and Batch Size, arXiv:2505.13738;
      only the abstract and reviews were read.
    """
    check_above_zero(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batch_size=batch_size,
        data_size=data_size,
    )
    return batch_size / (learning_rate * weight_decay * data_size)


def adamw_weight_decay(
    timescale: float, learning_rate: float, batch_size: float, data_size: float
) -> float:
    r"""Returns the weight decay for a timescale: :math:`\lambda = B / (\eta \tau D)`.

    If you change the batch size, do not change the timescale. With the same rate and data, the
    weight decay is then proportional to the batch size:

    >>> timescale = adamw_timescale(0.001, 0.1, batch_size=256, data_size=1e6)
    >>> round(adamw_weight_decay(timescale, 0.001, batch_size=1024, data_size=1e6), 6)
    0.4

    Args:
      timescale: :math:`\tau`, from `adamw_timescale` or `optimal_timescale`.
      learning_rate, batch_size, data_size: those of the run, see `adamw_timescale`.
    """
    check_above_zero(
        timescale=timescale, learning_rate=learning_rate, batch_size=batch_size, data_size=data_size
    )
    return batch_size / (learning_rate * timescale * data_size)


def optimal_timescale(tokens_per_parameter: float, coefficient: float, exponent: float) -> float:
    r"""Returns the best timescale by the Power Lines law: :math:`\tau = c \, (D / N)^m`.

    The constants c and m are arguments, because they hold for one family of language models, and
    because the paper itself was not read: m = -0.527 is from a review of the paper, and c of about
    1.08 is from memory, so c is unreliable.

    >>> round(optimal_timescale(20.0, coefficient=1.08, exponent=-0.527), 4)
    0.2227

    Args:
      tokens_per_parameter: D / N, the number of tokens seen divided by the number of parameters.
      coefficient: c.
      exponent: m.
    """
    check_above_zero(tokens_per_parameter=tokens_per_parameter, coefficient=coefficient)
    if not is_number(exponent) or not math.isfinite(exponent):
        raise ValueError(f"exponent={exponent!r} must be a finite number")
    return coefficient * tokens_per_parameter**exponent


def _batch_ratio(base_batch_size: int, batch_size: int) -> float:
    check_above_zero(base_batch_size=base_batch_size, batch_size=batch_size)
    return batch_size / base_batch_size
