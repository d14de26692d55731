"""What runs on each of several ranks that save through the Trainer, in every way of spreading a model over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_training import Classifier, trainer

from composerlite import dist

_TP = {"tensor_parallel_degree": 2, "layer_plan": {"body": "colwise", "head": "rowwise"}}

CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp": {"parallelism_config": {"tp": _TP}},
        "weights": {
            "parallelism_config": {"fsdp": {}},
            "save_weights_only": True,
            "save_filename": "sub/{run_name}-ba{batch}.pt",
            "save_latest_filename": "newest.pt",
        },
        "full": {"parallelism_config": {"fsdp": {"state_dict_type": "full"}}},
        "full weights": {"parallelism_config": {"fsdp": {"state_dict_type": "full"}}, "save_weights_only": True},
        "prefix": {"parallelism_config": {"fsdp": {"sharded_ckpt_prefix_dir": "at-{batch}"}}},
    },
    4: {
        "hsdp": {"parallelism_config": {"fsdp": {"data_parallel_replicate_degree": 2}}},
        "fsdp and tp": {"parallelism_config": {"fsdp": {}, "tp": _TP}},
    },
}


def train_all(folder: Path, world_size: int) -> dict[str, Any]:
    """Every case of so many ranks: what it ended with, by the keys of a checkpoint, and what it saved."""
    told: dict[str, Any] = {}
    for name, case in CASES[world_size].items():
        torch.manual_seed(3)
        with trainer(
            model=Classifier(8),
            save_folder=folder / name,
            save_interval="1ba",
            save_num_checkpoints_to_keep=1,
            train_subset_num_batches=2,
            max_duration="1ep",
            **case,
        ) as run:
            run.fit()
            tensors: dict[str, Any] = {}
            for key, parameter in run.state.model.named_parameters():
                tensors[f"state.model.{key}"] = dist.shards.full_tensor(parameter.detach()).clone()
                if not case.get("save_weights_only"):
                    moment = run.state.optimizers[0].state[parameter]["exp_avg"]
                    tensors[f"state.optimizers.Adam.state.{key}.exp_avg"] = dist.shards.full_tensor(moment).clone()
        told[name] = {"tensors": tensors, "saved": run.saved_checkpoints}
    return told
