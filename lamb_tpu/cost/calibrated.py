"""Constants of the network and of the computation that are fitted to published runs.

The fit, the runs and how far each is from the prediction: experiments/plan/calibration.md. Three
constants of the network are shared by all generations of TPU, and the computation of each has one.
The interval would have held nine in ten of the runs, each predicted from other teams' runs alone.
"""

from lamb_tpu.cost.network import Calibration, Constants

CALIBRATED = Calibration(
    Constants(1.0, 1.24e-07, 5.44e-07, 0.871, 4.02e-05, 0.779),
    Constants(1.0, 1.55e-07, 6.78e-07, 0.7, 5e-05, 0.97),
    Constants(0.409, 2.01e-06, 1e-05, 0.349, 1e-04, 1.95),
    "31 published runs on TPU v3 and v4",
    {"v3": 1.0, "v4": 0.75},
)
