"""For pages whose python examples read ``configs/…``: a copy of that folder in the current directory."""

import shutil
from pathlib import Path

import composerlite

shutil.copytree(Path(composerlite.__file__).parents[1] / "configs", "configs")
