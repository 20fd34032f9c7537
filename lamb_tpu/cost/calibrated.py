"""Constants of the network and of the computation that are fitted to published runs.

The fit, the runs and how far each is from the prediction: experiments/plan/calibration.md. Three
constants of the network are shared by all generations of TPU, and the computation of each has one.
The interval would have held nine in ten of the runs, each predicted from other teams' runs alone.
"""

from lamb_tpu.cost.network import Calibration, Constants

CALIBRATED = Calibration(
    Constants(1.0, 1.31e-07, 5.77e-07, 0.824, 4.25e-05, 0.823),
    Constants(1.0, 1.54e-07, 6.79e-07, 0.7, 5e-05, 0.969),
    Constants(0.395, 2.08e-06, 1.04e-05, 0.337, 0.000104, 2.01),
    "24 published runs on TPU v3 and v4",
    {"v3": 1.0, "v4": 0.75},
)
