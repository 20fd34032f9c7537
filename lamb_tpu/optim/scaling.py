"""Rules that carry a tuned learning rate, warm-up or weight decay to another batch size."""

import math
from collections.abc import Callable
from typing import NamedTuple

from lamb_tpu.optim.checks import check_above_zero, check_range, is_number

SCALING_RULES: dict[str, Callable[[float], float]] = {
    "identity": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}

# Optimizers by the names they have in a config. Those without second moments for every element
# (LARS, NovoGrad, APOLLO, AdaGrad-Norm, Lion, Adafactor, Muon) are not here: the theory does not
# speak of them.
RANDOM_MATRIX_RULES: dict[str, str] = {
    **dict.fromkeys(("sgd", "momentum", "nesterov"), "linear"),
    **dict.fromkeys(
        ("adam", "adamw", "adagrad", "diffgrad", "lamb", "rmsprop_tf", "schedule_free_adamw"),
        "sqrt",
    ),
}


class ScaledWarmup(NamedTuple):
    """Peak learning rate and length of warm-up that LEGW gives for a batch size."""

    learning_rate: float  # the peak
    warmup_epochs: float


def scale_learning_rate(
    rule: str, base_learning_rate: float, base_batch_size: int, batch_size: int
) -> float:
    """The learning rate for `batch_size`, from the one that was tuned at `base_batch_size`.

    >>> scale_learning_rate('linear', 0.1, 256, 8192)
    3.2
    >>> round(scale_learning_rate('sqrt', 5e-3, 32768, 512), 6)  # BERT in the LAMB paper
    0.000625

    Args:
      rule: 'identity', 'linear' (Goyal et al., arXiv:1706.02677) or 'sqrt' (the LAMB and LEGW
        papers); `random_matrix_rule` names one of the two.
      base_learning_rate: the tuned rate.
      base_batch_size: the batch size, in examples, at which it was tuned.
      batch_size: the batch size of the run, in examples.

    Raises:
      ValueError: an unknown rule, a negative rate, or a batch size that is not positive.
    """
    if not isinstance(rule, str) or rule not in SCALING_RULES:
        raise ValueError(f"rule {rule!r} is unknown; known: {', '.join(SCALING_RULES)}")
    check_range("base_learning_rate", base_learning_rate)
    return base_learning_rate * SCALING_RULES[rule](_batch_ratio(base_batch_size, batch_size))


def random_matrix_rule(optimizer: str) -> str:
    """The scaling rule that random matrix theory gives to a kind of optimizer.

    The largest stable rate is limited by the largest eigenvalue of the batch's Hessian, which small
    batches inflate. It grows with the batch linearly for SGD, and as the square root for methods
    that divide by the root of second moments; both stop growing at large batches, where the noise
    no longer rules.

    >>> random_matrix_rule('momentum'), random_matrix_rule('adamw')
    ('linear', 'sqrt')

    Args:
      optimizer: a name of `make_optimizer`. LAMB counts as adaptive, by the direction it scales.

    Returns:
      'linear' or 'sqrt', for `scale_learning_rate`.

    Raises:
      ValueError: an optimizer of neither kind.

    References:
      Granziol, Zohren, Roberts, Learning Rates as a Function of Batch Size, arXiv:2006.09092; its
      abstract only was read.
    """
    if not isinstance(optimizer, str) or optimizer not in RANDOM_MATRIX_RULES:
        raise ValueError(
            f"the random-matrix rule says nothing of the optimizer {optimizer!r}, only of "
            f"{', '.join(RANDOM_MATRIX_RULES)}; choose 'linear' or 'sqrt'"
        )
    return RANDOM_MATRIX_RULES[optimizer]


def legw(
    base_learning_rate: float, base_warmup_epochs: float, base_batch_size: int, batch_size: int
) -> ScaledWarmup:
    """LEGW: for k times the batch, sqrt(k) times the rate and k times the warm-up epochs.

    The number of warm-up updates stays what it was.

    >>> legw(4 / (2**3 * 100), 0.3125, 512, 32768)  # ResNet-50 in the LAMB paper
    ScaledWarmup(learning_rate=0.04, warmup_epochs=20.0)

    Args:
      base_learning_rate: the peak rate that was tuned at `base_batch_size`.
      base_warmup_epochs: the warm-up there, in epochs; fractions are meant.
      base_batch_size: in examples.
      batch_size: in examples.

    Raises:
      ValueError: a batch size that is not positive, or a negative warm-up.

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
    r"""AdamW's timescale: over what part of the run its weights average the updates.

    Decoupled decay makes the weights an exponential moving average of updates. Its memory, as a
    part of the run, is

    .. math:: \tau = \frac{B}{\eta \lambda D}

    >>> round(adamw_timescale(0.001, 0.1, batch_size=1_000_000, data_size=20e9), 6)
    0.5

    Args:
      learning_rate: :math:`\eta`, the peak.
      weight_decay: :math:`\lambda`, multiplied by the learning rate as in `optax.adamw`.
      batch_size: :math:`B`, in tokens or examples.
      data_size: :math:`D`, all that the run sees, in the same unit.

    Raises:
      ValueError: an argument that is not positive.

    References:
      Bergsma et al., Power Lines: Scaling Laws for Weight Decay and Batch Size, arXiv:2505.13738;
      the abstract and reviews were read.
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
    r"""The weight decay of a timescale: :math:`\lambda = B / (\eta \tau D)`, of `adamw_timescale`.

    To change the batch, keep the timescale. At the same rate and data the decay is then linear in
    the batch:

    >>> timescale = adamw_timescale(0.001, 0.1, batch_size=256, data_size=1e6)
    >>> round(adamw_weight_decay(timescale, 0.001, batch_size=1024, data_size=1e6), 6)
    0.4

    Args:
      timescale: :math:`\tau`, from `adamw_timescale` or `optimal_timescale`.
      learning_rate, batch_size, data_size: those of the run, as for `adamw_timescale`.

    Raises:
      ValueError: an argument that is not positive.
    """
    check_above_zero(
        timescale=timescale, learning_rate=learning_rate, batch_size=batch_size, data_size=data_size
    )
    return batch_size / (learning_rate * timescale * data_size)


def optimal_timescale(tokens_per_parameter: float, coefficient: float, exponent: float) -> float:
    r"""Power Lines' law for the best timescale: :math:`\tau = c \, (D / N)^m`.

    The constants are arguments because they hold for one family of language models, and are known
    here at second hand only: m = -0.527 as a review of the paper gives it, c about 1.08 as it is
    remembered, which is not to be relied on.

    >>> round(optimal_timescale(20.0, coefficient=1.08, exponent=-0.527), 4)
    0.2227

    Args:
      tokens_per_parameter: D / N, tokens seen over parameters trained.
      coefficient: c.
      exponent: m.

    Raises:
      ValueError: tokens or coefficient not positive, an exponent that is no finite number.
    """
    check_above_zero(tokens_per_parameter=tokens_per_parameter, coefficient=coefficient)
    if not is_number(exponent) or not math.isfinite(exponent):
        raise ValueError(f"exponent must be a finite number, not {exponent!r}")
    return coefficient * tokens_per_parameter**exponent


def _batch_ratio(base_batch_size: int, batch_size: int) -> float:
    check_above_zero(base_batch_size=base_batch_size, batch_size=batch_size)
    return batch_size / base_batch_size
