"""Constants of the network and of the computation that are fitted to published runs.

The fit, the runs and how far each is from the prediction: experiments/plan/calibration.md. Three
constants of the network are shared by all generations of TPU, and the computation of each has one.
The interval would have held nine in ten of the runs, each predicted from other teams' runs alone.
"""

from lamb_tpu.cost.network import Calibration, Constants

CALIBRATED = Calibration(
    Constants(1.0, 1.3e-07, 5.76e-07, 0.826, 4.24e-05, 0.786),
    Constants(1.0, 1.54e-07, 6.8e-07, 0.7, 5e-05, 0.927),
    Constants(0.38, 2.16e-06, 1.08e-05, 0.325, 0.000108, 2.0),
    "22 published runs on TPU v3 and v4",
    {"v3": 1.0, "v4": 0.75},
)
