"""A run from a YAML file: :func:`load_config` reads and checks it, :func:`build_trainer` builds what it names.

Importing this package and reading a file do not import torch.
"""

from composerlite.config.build import build_trainer
from composerlite.config.schema import RunConfig
from composerlite.config.yaml import load_config

__all__ = ["RunConfig", "build_trainer", "load_config"]
