"""A run from a YAML file: :func:`load_config` reads and checks it, :func:`build_trainer` builds what it names.
:func:`reference_page` and :func:`json_schema` tell what such a file may say.

Importing this package and reading a file do not import torch.
"""

from composerlite.config.build import build_trainer
from composerlite.config.reference.editor_schema import json_schema
from composerlite.config.reference.page import reference_page
from composerlite.config.schema import RunConfig
from composerlite.config.yaml import load_config

__all__ = ["RunConfig", "build_trainer", "json_schema", "load_config", "reference_page"]
