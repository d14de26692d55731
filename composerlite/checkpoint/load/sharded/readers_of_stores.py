"""Composer's names for what reads sharded checkpoints with ``torch.distributed.checkpoint.load``."""

from __future__ import annotations

import os
from typing import Any, final

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from composerlite.checkpoint.load.sharded.reader import RemoteFileSystemReader
from composerlite.checkpoint.place.directory import RemoteFolder
from composerlite.storage import ObjectStore

__all__ = ["DistCPObjectStoreReader", "FileSystemReaderWithValidation"]


class _WrappedReader(StorageReader):
    """Does what the reader that it was made with does."""

    def __init__(self, reader: RemoteFileSystemReader) -> None:
        super().__init__()
        self._reader = reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again, with another checkpoint if one is given."""
        self._reader.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read once."""
        return self._reader.read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed: the index is this reader's own."""
        self._reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return self._reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return self._reader.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` wants and give it to ``planner``."""
        return self._reader.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URI may be one."""
        return RemoteFileSystemReader.validate_checkpoint_id(checkpoint_id)

    def close(self) -> None:
        """Let go of connections and temporary files; twice is fine."""
        self._reader.close()


@final
class FileSystemReaderWithValidation(_WrappedReader):
    """Reads a sharded checkpoint from a folder, verified by its commit record, if it has one.

    Each file is first shown to the function that the environment variable ``CHECKPOINT_VALIDATION_FUNCTION`` names.

    Args:
        path: of the checkpoint's directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(RemoteFileSystemReader(path))


@final
class DistCPObjectStoreReader(_WrappedReader):
    """Reads a sharded checkpoint from an object store; brings the files that this rank needs to this machine first.

    The ranks of one machine bring each file once. Files stay, for this very checkpoint only.

    Args:
        source_path: the directory's name in the store.
        destination_path: a folder of this machine for the files.
        object_store: which stays open.
        device_mesh: as Composer has it; not needed.
    """

    def __init__(
        self, source_path: str, destination_path: str, object_store: ObjectStore, device_mesh: Any = None
    ) -> None:
        folder = RemoteFolder(object_store, source_path)
        super().__init__(RemoteFileSystemReader(folder, pre_download=True, work_dir=destination_path))
