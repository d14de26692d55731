"""Files and checkpoints brought to a folder of one's own: from local paths, and later from object stores."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from composerlite.checkpoint.formats import is_packed, is_tar, unpacked
from composerlite.errors import CheckpointNotFoundError, ConfigError
from composerlite.storage import StagedFile, replace_symlink

__all__ = ["download_checkpoint", "get_file"]

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PLAIN_NAME, _ARCHIVED_NAME = "rank0_checkpoint", "composer_states.pt"


def get_file(
    path: str | Path,
    destination: str | Path,
    object_store: object = None,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> None:
    """Make the file ``path`` available as ``destination``: a symbolic link to it, since it is on this machine.

    Args:
        path: a file.
        destination: a path at which there is nothing, in a folder that exists.
        object_store: none yet.
        overwrite: replace what is at ``destination``.
        progress_bar: not used: nothing is copied.

    Raises:
        CheckpointNotFoundError: there is no file ``path``.
        FileExistsError: there is something at ``destination`` and ``overwrite`` is false.
        ConfigError: ``path`` is a URI, or an object store is given.
    """
    source, target = _local(path, object_store), Path(destination)
    if overwrite:
        replace_symlink(target, str(source))
    else:
        target.symlink_to(source)


def download_checkpoint(
    path: str | Path,
    node_checkpoint_folder: str | Path,
    object_store: object = None,
    progress_bar: bool = True,
    fsdp_sharded_state_dict_enabled: bool = False,
    deepspeed_sharded_checkpoint: bool = False,
) -> tuple[str, str | None, bool]:
    """Bring the checkpoint ``path`` to ``node_checkpoint_folder``, unpacked, for ``safe_torch_load``.

    A file that ``torch.load`` opens as it is is linked, not copied.

    Args:
        path: of the checkpoint, in any format.
        node_checkpoint_folder: a folder.
        object_store: none yet.
        progress_bar: not used: what is read is on this machine.
        fsdp_sharded_state_dict_enabled: must be false: sharded checkpoints are read in place.
        deepspeed_sharded_checkpoint: must be false, too.

    Returns:
        The path of the ``.pt`` file; the folder that the archive was extracted to, ``None`` if it was none; and
        whether another rank's archive was extracted, which is never so.

    Raises:
        CheckpointNotFoundError: there is no file ``path``.
        CorruptCheckpointError: it cannot be unpacked.
        ConfigError: ``path`` is a URI, an object store is given, or the checkpoint is said to be sharded.
    """
    if fsdp_sharded_state_dict_enabled or deepspeed_sharded_checkpoint:
        raise ConfigError(f"{str(path)!r}: sharded checkpoints are not downloaded yet; load them from where they are")
    source, folder = _local(path, object_store), Path(node_checkpoint_folder)
    if not is_packed(source):
        target = folder / _PLAIN_NAME
        get_file(source, target, overwrite=True)
        return str(target), None, False
    extracted = folder / "checkpoint" if is_tar(source) else None
    target = folder / _PLAIN_NAME if extracted is None else extracted / _ARCHIVED_NAME
    target.parent.mkdir(exist_ok=True)
    with unpacked(source) as file, StagedFile(target) as staged:
        shutil.copyfileobj(file, staged.file, 1 << 20)
        staged.flush()
        staged.publish()
    return str(target), None if extracted is None else str(extracted), False


def _local(path: str | Path, object_store: object) -> Path:
    if object_store is not None or _URI.match(str(path)):
        raise ConfigError(f"{str(path)!r}: object stores are not read yet. Download the file and give its local path.")
    if not Path(path).is_file():
        raise CheckpointNotFoundError(f"there is no file {str(path)!r}")
    return Path(path).resolve()
