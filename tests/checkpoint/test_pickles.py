"""What stands beside the data in a ``.pt`` file is what ``torch.save`` would have written, byte for byte."""

from __future__ import annotations

import collections
import io
import zipfile
from typing import Any

import pytest
import torch
from torch import nn

from composerlite.checkpoint.format.torch_file import Pickled

WEIGHT = torch.arange(12.0).view(3, 4)
CONTENTS: dict[str, Any] = {
    "plain values": {"a": 1, "b": [2.5, None, True], "c": ("x", b"y"), "d": {"e": {3}}, "f": 1 << 70},
    "views of one storage": {"a": WEIGHT, "b": WEIGHT[1], "c": WEIGHT.t(), "d": WEIGHT.detach(), "e": WEIGHT},
    "of other types": [torch.zeros(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.uint32, torch.cfloat)],
    "a module's": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict(),
    "parameters": [nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), torch.tensor(7), torch.empty(0)],
    "ordered": collections.OrderedDict(a=collections.OrderedDict(), b=collections.OrderedDict(c=1)),
    "sparse": torch.eye(3).to_sparse(),
    "a storage itself": {"a": torch.arange(3.0).untyped_storage(), "b": WEIGHT, "c": torch.ones(3)},
    "a tensor with attributes": {"a": torch.ones(2), "b": torch.zeros(2)},
}
CONTENTS["a tensor with attributes"]["a"].note = "kept"


@pytest.mark.parametrize("what", CONTENTS)
def test_the_pickle_is_that_of_torch(what: str) -> None:
    """Also where tensors are reduced in a quicker way than torch's."""
    contents = CONTENTS[what]
    file = io.BytesIO()
    torch.save(contents, file)
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        expected = archive.read(name)
        sizes = [info.file_size for info in archive.infolist() if "/data/" in info.filename]
    pickled = Pickled(contents)
    assert pickled.data == expected
    assert [storage.nbytes() for storage in pickled.storages] == sizes


def test_tensors_of_two_types_cannot_share_memory() -> None:
    """The format has one type for each storage: an error, and not a file with one of them wrong."""
    both = {"a": WEIGHT, "b": WEIGHT.view(torch.int32)}
    with pytest.raises(ValueError, match=r"share memory with the dtypes torch\.float32 and torch\.int32"):
        Pickled(both)
