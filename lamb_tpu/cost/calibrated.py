"""Constants of the network and of the computation that are fitted to published runs.

The fit, the runs and how far each is from the prediction: experiments/plan/calibration.md. Three
constants of the network are shared by all generations of TPU, and the computation of each has one.
The interval would have held nine in ten of the runs, each predicted from other teams' runs alone.
"""

from lamb_tpu.cost.network import Calibration, Constants

CALIBRATED = Calibration(
    Constants(1.0, 1.32e-07, 5.79e-07, 0.82, 4.27e-05, 0.828),
    Constants(1.0, 1.55e-07, 6.78e-07, 0.7, 5e-05, 0.97),
    Constants(0.414, 1.98e-06, 9.91e-06, 0.353, 9.91e-05, 1.92),
    "29 published runs on TPU v3 and v4",
    {"v3": 1.0, "v4": 0.75},
)
