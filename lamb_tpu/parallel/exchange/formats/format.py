"""A floating-point format of few bits: its fields, and what its last codes mean."""

import dataclasses

STYLES = ("ieee", "fn", "finite", "cpd")


@dataclasses.dataclass(frozen=True)
class Format:
    """Sign, exponent and mantissa, with subnormal numbers; the bias is 2^(exponent_bits - 1) - 1.

    Styles differ in what the largest exponent means, and in values that are too large:

    - 'ieee': infinity and NaN. Values that round to more than the largest become infinite.
    - 'fn': numbers, but the code of all ones is NaN, which too large values become: OCP's E4M3.
    - 'finite': numbers only. Too large values become the largest, and NaN zero: OCP's FP4 and FP6,
      as the package `ml_dtypes` has them.
    - 'cpd': 'ieee' as the emulator CPD casts (github.com/drcut/CPD, commit ddd9a67,
      CPDtorch/quant/quant_cuda/float_kernel.cu). It asks before rounding whether a value is too
      large, so the largest exponent can round up to 2^(largest exponent + 1). Below the normal
      numbers it drops bits before it rounds, so what is just above a tie counts as a tie. float32's
      own subnormal numbers become +0.

    Every style rounds to nearest, ties to an even significand. Without mantissa bits the
    significand of 2^k is odd, so that ties round up.

    Attributes:
      exponent_bits: 1 to 8.
      mantissa_bits: 0 to 23; at least 1 in the style 'fn'.
      style: one of `STYLES`.

    Raises:
      ValueError: an attribute is out of its range.
    """

    exponent_bits: int
    mantissa_bits: int
    style: str = "ieee"

    def __post_init__(self) -> None:
        if not 1 <= self.exponent_bits <= 8:
            raise ValueError(f"exponent_bits must be 1 to 8, not {self.exponent_bits}")
        least = int(self.style == "fn")
        if not least <= self.mantissa_bits <= 23:
            raise ValueError(f"mantissa_bits must be {least} to 23, not {self.mantissa_bits}")
        if self.style not in STYLES:
            raise ValueError(f"style must be one of {', '.join(STYLES)}, not {self.style!r}")
        if self.style in ("fn", "finite") and self.exponent_bits == 8:
            raise ValueError(
                f"exponent_bits must be at most 7 in the style {self.style!r}: with 8 the largest "
                "values are outside of float32"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The exponent bias, which is added to an exponent before it is stored."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def reserved(self) -> bool:
        """True where the largest stored exponent means infinity and NaN."""
        return self.style in ("ieee", "cpd")

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest value."""
        return 2**self.exponent_bits - 1 - self.bias - self.reserved

    @property
    def largest(self) -> float:
        """The largest finite value."""
        if self.reserved and self.exponent_bits == 1:  # without normal numbers
            return self.smallest_normal - self.step
        ulp = 2.0**-self.mantissa_bits
        return 2.0**self.largest_exponent * (2 - ulp * (2 if self.style == "fn" else 1))

    @property
    def smallest_normal(self) -> float:
        """The smallest value with all its mantissa bits."""
        return 2.0 ** (1 - self.bias)

    @property
    def step(self) -> float:
        """Distance of neighbouring values below `smallest_normal`."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def __str__(self) -> str:
        suffix = {"ieee": "", "cpd": "", "fn": "fn", "finite": "fn"}[self.style]
        return f"e{self.exponent_bits}m{self.mantissa_bits}{suffix}"


E2M1FN = Format(2, 1, "finite")
E3M0 = Format(3, 0)
E4M3 = Format(4, 3)
E4M3FN = Format(4, 3, "fn")
E5M2 = Format(5, 2)
