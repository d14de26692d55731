"""A run from a YAML file: :func:`load_config` reads and checks it, :func:`build_trainer` builds what it names.
:func:`reference_page` and :func:`json_schema` tell what such a file may say.

Importing this package and reading a file do not import torch.
"""

from composerlite.config.build import build_trainer
from composerlite.config.loading import load_config, load_kept
from composerlite.config.reference import json_schema, reference_page
from composerlite.config.schema import RunConfig

__all__ = ["RunConfig", "build_trainer", "json_schema", "load_config", "load_kept", "reference_page"]
