"""A store of one's own, with the four verbs of Composer's: the rest follows from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Trainer
from composerlite.errors import CorruptCheckpointError, ObjectStoreError
from composerlite.models import ComposerClassifier
from composerlite.storage import Transfer
from composerlite.utils import ObjectStore, get_file


class Shelf(ObjectStore):
    """A folder, as a script of Composer would write it: its names of arguments, a listing of names, no more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def upload_object(
        self,
        object_name: str,
        filename: str | Path,
        callback: Callable[[int, int], None] | None = None,
        **kwargs: object,
    ) -> None:
        target = self.folder / object_name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(filename, target)

    def get_object_size(self, object_name: str) -> int:
        return (self.folder / object_name).stat().st_size

    def download_object(
        self,
        object_name: str,
        filename: str | Path,
        overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:
        if Path(filename).exists() and not overwrite:
            raise FileExistsError(filename)
        shutil.copyfile(self.folder / object_name, filename)

    def list_objects(self, prefix: str | None = None) -> list[str]:  # type: ignore[override]
        names = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return [name for name in names if name.startswith(prefix or "")]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """A store with two objects."""
    store = Shelf(tmp_path / "shelf")
    for name in ("run/b.txt", "run/a.txt"):
        (tmp_path / "content").write_text(name)
        store.upload_object(name, tmp_path / "content")
    return store


def test_four_verbs_are_enough(shelf: Shelf) -> None:
    """Bytes are put and read in ranges, listings are in order and have sizes, and the bucket is seen to be writable."""
    shelf.put_bytes("run/c.txt", b"12345")
    assert shelf.read_range("run/c.txt", 1, 3) == b"234"
    with pytest.raises(FileExistsError, match=r"Shelf://run/c\.txt: create"):
        shelf.put_bytes("run/c.txt", b"", create_only=True)
    with Transfer(shelf) as transfer:
        listed = transfer.list("run/")
        with pytest.raises(CorruptCheckpointError, match="has 5 bytes where 6 were expected"):
            transfer.download("run/c.txt", shelf.folder / "copy", size_bytes=6)
    assert not (shelf.folder / "copy").exists()
    assert [(one.name, one.size_bytes) for one in listed] == [("run/a.txt", 9), ("run/b.txt", 9), ("run/c.txt", 5)]
    assert shelf.read_tail("run/c.txt", 2) == (5, b"45")
    assert shelf.list_level("") == ([], ["run/"])
    _, version = shelf.read_versioned("run/c.txt")
    shelf.swap_bytes("run/c.txt", b"67890", version)
    for name in ("run/c.txt", "run/missing.txt"):
        with pytest.raises(FileExistsError, match=rf"Shelf://{name}: swap"):
            shelf.swap_bytes(name, b"", version)
    assert shelf.read_versioned("run/c.txt")[0] == b"67890"
    shelf.check_writable("run/")
    shelf.close()


def test_ranges_of_ones_own_are_read(shelf: Shelf, tmp_path: Path) -> None:
    """A store may read ranges itself."""

    class Stream(Shelf):
        reads_ranges = True

        def read_range(self, name: str, offset: int, size: int) -> bytes:
            return (self.folder / name).read_bytes()[offset : offset + size]

        def download_object(self, *_: object, **__: object) -> None:
            raise AssertionError("the store reads ranges")

    get_file("run/a.txt", tmp_path / "copy", Stream(shelf.folder))
    assert (tmp_path / "copy").read_text() == "run/a.txt"


def test_what_does_not_follow_from_them_is_said(shelf: Shelf) -> None:
    """Nothing can be deleted: the error names the method to add."""
    with pytest.raises(ObjectStoreError, match="Shelf has no delete_object"):
        shelf.delete_object("run/a.txt")
    with pytest.raises(TypeError, match="list_objects"):
        type("Half", (ObjectStore,), {"upload_object": Shelf.upload_object})()


def test_a_checkpoint_is_loaded_from_such_a_store(shelf: Shelf, tmp_path: Path) -> None:
    """``load_object_store`` and ``get_file`` take it, as in Composer."""
    data = DataLoader(TensorDataset(torch.randn(4, 2), torch.tensor([0, 1, 0, 1])), batch_size=2)

    def trainer(**arguments: object) -> Trainer:
        model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"model": model, "optimizers": optimizer, "train_dataloader": data, "progress_bar": False, **arguments}
        return Trainer(**given)  # type: ignore[arg-type]

    with trainer(max_duration="1ep", save_folder=tmp_path / "saved", save_filename="ep{epoch}.pt") as first:
        first.fit()
        shelf.upload_object("run/checkpoints/ep1.pt", tmp_path / "saved" / "ep1.pt")
    with trainer(max_duration="2ep", load_path="run/checkpoints/ep1.pt", load_object_store=shelf) as second:
        assert second.state.timestamp.epoch == 1
    get_file("run/a.txt", tmp_path / "got", object_store=shelf, progress_bar=False)
    assert (tmp_path / "got").read_text() == "run/a.txt"
