"""Training runs from YAML files: :func:`load_config` reads a file, :func:`build_trainer` builds the Trainer.

:func:`json_schema` lists the valid keys and names. Importing this package and reading a file do not import torch.
"""

from composerlite.config.build import build_trainer
from composerlite.config.loading import load_config, load_kept
from composerlite.config.reference import json_schema
from composerlite.config.schema import RunConfig

__all__ = ["RunConfig", "build_trainer", "json_schema", "load_config", "load_kept"]
