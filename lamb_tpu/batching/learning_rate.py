"""Factors of the learning rate for a batch size that changes.

If the batch size changes, the schedule is a function of the number of examples seen. But an
optimizer counts updates, not examples. Therefore the host evaluates the schedule, and passes the rate of
each update to the step, see `parallel.changing.ChangingStep`.
"""

from lamb_tpu.optim.checks import check_above_zero, check_range
from lamb_tpu.optim.scaling import scale_learning_rate


def rate_factor(
    rule: str, base_batch_size: int, batch_size: int, adjust_factor: float = 1.0
) -> float:
    """Returns the factor by which the schedule's rate is multiplied at a batch size.

    >>> rate_factor('sqrt', 256, 1024), rate_factor('sqrt', 256, 1024, adjust_factor=0.5)
    (2.0, 1.5)

    Args:
      rule: 'identity' for a rate that does not depend on the batch, 'linear' or 'sqrt', see
        `optim.scale_learning_rate`.
      base_batch_size: the batch size, in examples, for which the schedule was tuned.
      batch_size: the current batch size, in examples.
      adjust_factor: the fraction of the change that is applied, SimiGrad's `lr_adjust_factor`: a
        factor f of the rule becomes 1 + adjust_factor (f - 1). SimiGrad's defaults are 'sqrt' and
        1.

    Raises:
      ValueError: the rule is unknown, a batch size is not positive, or `adjust_factor` is negative.
    """
    check_above_zero(base_batch_size=base_batch_size, batch_size=batch_size)
    check_range("adjust_factor", adjust_factor)
    return (scale_learning_rate(rule, 1.0, base_batch_size, batch_size) - 1) * adjust_factor + 1
