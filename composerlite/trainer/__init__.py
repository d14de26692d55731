"""The trainer."""

from composerlite.trainer.trainer import Trainer

__all__ = ["Trainer"]
