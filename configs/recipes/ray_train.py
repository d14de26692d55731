"""Ranks as the workers of Ray Train: when one is lost, all are started again and the run resumes.

RANKS=8 python configs/recipes/ray_train.py save_folder=/shared/runs/digits

Files and folders must be where every node finds them: a shared folder, or a bucket.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from composerlite.config import build_trainer, load_config


def train(run: dict[str, Any]) -> None:
    """What each worker does, in a process group that Ray has made."""
    with build_trainer(load_config(run["config"], run["overrides"])) as trainer:
        trainer.fit()


if __name__ == "__main__":
    config = str(Path(os.environ.get("CONFIG", "configs/digits.yaml")).resolve())
    overrides = ["run_name=digits", "autoresume=true", *sys.argv[1:]]
    load_config(config, overrides)  # a mistake in it is raised here: Ray would start the workers again and again
    TorchTrainer(
        train,
        train_loop_config={"config": config, "overrides": overrides},
        scaling_config=ScalingConfig(num_workers=int(os.environ.get("RANKS", "2")), use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="digits", failure_config=FailureConfig(max_failures=100)),
    ).fit()
