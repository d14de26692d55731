"""Ranks as the workers of Ray Train: when one is lost, all are started again and the run resumes.

RANKS=8 python configs/recipes/ray_train.py save_folder=/shared/runs/digits

Files and folders must be where every node finds them: a shared folder, or a bucket. Where Ray drains a node,
such as a spot instance that is about to go, the run saves and ends, and Ray starts the workers on other nodes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from composerlite import Callback, Logger, State
from composerlite.callbacks import PreemptionHandler
from composerlite.config import build_trainer, load_config


class AskRay(Callback):
    """Asks Ray after every tenth batch, for which all workers wait for each other, if a node is about to go."""

    def batch_end(self, state: State, logger: Logger) -> None:
        ask = getattr(ray.train, "get_preemption_info", None)  # seen in Ray 2.60; an old Ray does not tell
        notice = None if ask is None or int(state.timestamp.batch) % 10 else ask()
        if notice is not None:
            left = None if notice.deadline_ms is None else max(1.0, notice.deadline_ms / 1000 - time.time())
            (handler,) = [one for one in state.callbacks if isinstance(one, PreemptionHandler)]
            handler.preempt("Ray drains a node", left)


def train(run: dict[str, Any]) -> None:
    """What each worker does, in a process group that Ray has made."""
    with build_trainer(load_config(run["config"], run["overrides"])) as trainer:
        trainer.state.callbacks.append(AskRay())
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
