"""Constants of the network and of the computation that are fitted to measured runs.

`python -m experiments.plan` generates this file. experiments/plan/calibration.md describes the fit,
and compares each run with its plan. Each generation of TPU has three sets of constants, for the
shortest, the expected and the longest time of a program that has no runs in the fit.
"""

from lamb_tpu.cost.network import Bounds, Calibrations, Constants, Validation

CALIBRATED = Calibrations(
    {
        "v3": Bounds(
            Constants(1.0, 7.44e-08, 3.25e-07, 1.0, 2.4e-05, 0.466),
            Constants(1.0, 1.55e-07, 6.78e-07, 0.7, 5e-05, 0.97),
            Constants(0.394, 2.08e-06, 1.04e-05, 0.336, 0.000104, 2.02),
        ),
        "v4": Bounds(
            Constants(1.0, 7.44e-08, 3.25e-07, 1.0, 2.4e-05, 0.35),
            Constants(1.0, 1.55e-07, 6.78e-07, 0.7, 5e-05, 0.728),
            Constants(0.394, 2.08e-06, 1.04e-05, 0.336, 0.000104, 1.51),
        ),
    },
    Bounds(
        Constants(1.0, 6.42e-08, 2.81e-07, 1.0, 2.07e-05, 0.349),
        Constants(1.0, 1.55e-07, 6.78e-07, 0.7, 5e-05, 0.84),
        Constants(0.34, 2.41e-06, 1.21e-05, 0.29, 0.000121, 2.03),
    ),
    "31 published runs on TPU v3 and v4",
    Validation(
        (28, 31), {"v3": (23, 24), "v4": (7, 7)},
        (0.147, 0.528), (0.0153, 0.171),
    ),
)
