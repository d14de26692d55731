"""What tools need that look at checkpoints which others save and load: listing, comparing, copying, converting.

The names below are imported when they are first used: what needs manifests only is there without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composerlite.checkpoint.place.places import MANIFESTS, Leftover, Place, StoredFile
    from composerlite.checkpoint.tools.comparing import Change, Difference, compared, flat
    from composerlite.checkpoint.tools.converting import write_directory, write_file, write_safetensors
    from composerlite.checkpoint.tools.copying import copy
    from composerlite.checkpoint.tools.huggingface import (
        is_huggingface_folder,
        kept_by_huggingface,
        write_huggingface,
        write_tokenizer,
    )
    from composerlite.checkpoint.tools.inspecting import Leaf, contents_of, leaves_of_contents, model_directory
    from composerlite.checkpoint.tools.pointing import Pointed, place_at, pointed, target_at
    from composerlite.checkpoint.tools.surveying import UNLISTED, Found, abandoned, newest, survey, vouched_from_above
    from composerlite.checkpoint.tools.whole import model_and_integrations, weights_of, whole_contents

__all__ = [
    "MANIFESTS",
    "UNLISTED",
    "Change",
    "Difference",
    "Found",
    "Leaf",
    "Leftover",
    "Place",
    "Pointed",
    "StoredFile",
    "abandoned",
    "compared",
    "contents_of",
    "copy",
    "flat",
    "is_huggingface_folder",
    "kept_by_huggingface",
    "leaves_of_contents",
    "model_and_integrations",
    "model_directory",
    "newest",
    "place_at",
    "pointed",
    "survey",
    "target_at",
    "vouched_from_above",
    "weights_of",
    "whole_contents",
    "write_directory",
    "write_file",
    "write_huggingface",
    "write_safetensors",
    "write_tokenizer",
]

_HOMES = {
    "composerlite.checkpoint.tools.comparing": ("Change", "Difference", "compared", "flat"),
    "composerlite.checkpoint.tools.converting": ("write_directory", "write_file", "write_safetensors"),
    "composerlite.checkpoint.tools.copying": ("copy",),
    "composerlite.checkpoint.tools.huggingface": (
        "is_huggingface_folder",
        "kept_by_huggingface",
        "write_huggingface",
        "write_tokenizer",
    ),
    "composerlite.checkpoint.tools.inspecting": ("Leaf", "contents_of", "leaves_of_contents", "model_directory"),
    "composerlite.checkpoint.place.places": ("MANIFESTS", "Leftover", "Place", "StoredFile"),
    "composerlite.checkpoint.tools.pointing": ("Pointed", "place_at", "pointed", "target_at"),
    "composerlite.checkpoint.tools.surveying": (
        "UNLISTED",
        "Found",
        "abandoned",
        "newest",
        "survey",
        "vouched_from_above",
    ),
    "composerlite.checkpoint.tools.whole": ("model_and_integrations", "weights_of", "whole_contents"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'composerlite.checkpoint.tools' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
