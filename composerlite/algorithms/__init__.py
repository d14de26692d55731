"""Changes to training that can be switched on by name: ``Trainer(algorithms=[EMA(), BlurPool()])``."""

from composerlite.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool, apply_blurpool
from composerlite.algorithms.ema import EMA
from composerlite.algorithms.gradient_clipping import GradientClipping, apply_gradient_clipping
from composerlite.algorithms.label_smoothing import LabelSmoothing, smooth_labels
from composerlite.algorithms.no_op_model import NoOpModel
from composerlite.algorithms.swa import SWA

__all__ = [
    "EMA",
    "SWA",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool",
    "GradientClipping",
    "LabelSmoothing",
    "NoOpModel",
    "apply_blurpool",
    "apply_gradient_clipping",
    "smooth_labels",
]
