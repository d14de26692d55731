"""What the examples on migration leave out: a small model, its data, and checkpoints as other programs save them."""

import datetime
import random
import runpy
from pathlib import Path

import numpy as np
import torch
from torch import nn

import composerlite

globals().update(runpy.run_path(str(Path(composerlite.__file__).parents[1] / "tests/docs_preludes/small_model.py")))


def trained():
    """A bare network and its optimizer, after a step."""
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    network(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return network, optimizer


def composer_file(path, batch=6, batches_per_epoch=4, batch_size=16):
    """What Composer's Trainer saves in one process: plain torch, optimizer state by the names of parameters."""
    network, optimizer = trained()
    named = [f"module.{name}" for name, _ in network.named_parameters()]
    saved = optimizer.state_dict()
    epoch, batch_in_epoch = divmod(batch, batches_per_epoch)
    counts = {"iteration": 0, "epoch": epoch, "batch": batch, "sample": batch * batch_size, "token": 0}
    counts |= {"epoch_in_iteration": epoch, "token_in_iteration": 0, "batch_in_epoch": batch_in_epoch}
    counts |= {"sample_in_epoch": batch_in_epoch * batch_size, "token_in_epoch": 0}
    clocks = dict.fromkeys(("total_wct", "iteration_wct", "epoch_wct", "batch_wct"), datetime.timedelta(seconds=1))
    state = {
        "model": {f"module.{name}": value for name, value in network.state_dict().items()},
        "optimizers": {
            "AdamW": {
                "state": {named[index]: value for index, value in saved["state"].items()},
                "param_groups": [{**saved["param_groups"][0], "params": named}],
            }
        },
        "schedulers": {},
        "algorithms": [],
        "callbacks": {"CheckpointSaver": {"all_saved_checkpoints_to_timestamp": []}},
        "scaler": {},
        "timestamp": {"Timestamp": {**counts, **clocks}},
        "rank_zero_seed": 3,
        "run_name": "1700000000-quick-fox",
        "dataset_state": {"train": None, "eval": {}},
        "integrations": {},
        "metadata": {"composer_env_info": {"composer_version": "0.32.1"}, "world_size": 1, "precision": "fp32"},
    }
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    torch.save({"state": state, "rng": [generators]}, path)


def lightning_file(path):
    """What Lightning 2.6 saves, with the loops left empty."""
    network, optimizer = trained()
    contents = {
        "epoch": 1,
        "global_step": 8,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"net.{name}": value for name, value in network.state_dict().items()},
        "loops": {"fit_loop": {}, "validate_loop": {}, "test_loop": {}, "predict_loop": {}},
        "callbacks": {
            "EarlyStopping{'monitor': 'loss', 'mode': 'min'}": {"wait_count": 0, "best_score": torch.ones(())}
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 8, "lr": 0.01},
    }
    torch.save(contents, path)
