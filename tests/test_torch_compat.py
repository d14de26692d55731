"""What each private name of torch must do, with every supported release of torch."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import pickle
import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import composerlite
from composerlite import _torch_compat as compat

PACKAGE = Path(composerlite.__file__).parent


def test_rebuild_tensor_is_the_function_that_files_name() -> None:
    """What ``torch.save`` writes names it; a pickle of ours is the same only while it has that name."""
    assert (
        f"{compat.rebuild_tensor.__module__}.{compat.rebuild_tensor.__qualname__}" == "torch._utils._rebuild_tensor_v2"
    )
    assert torch.arange(3.0).__reduce_ex__(2)[0] is compat.rebuild_tensor


def test_extra_state_is_the_end_of_the_names_of_what_modules_keep_besides() -> None:
    """Of a part of a module, too."""

    class Keeps(nn.Module):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    assert nn.Sequential(Keeps()).state_dict() == {f"0.{compat.EXTRA_STATE}": {"a": 1}}


def test_change_count_counts_changes_in_place() -> None:
    """Also through a view; not through ``.data``. Tensors of inference mode are not counted."""
    tensor = torch.zeros(4)
    before = compat.change_count(tensor)
    tensor[1:].add_(1)
    assert compat.change_count(tensor) == before + 1
    tensor.data.add_(1)
    assert compat.change_count(tensor) == before + 1
    with torch.inference_mode():
        assert compat.change_count(torch.zeros(1)) == -1


class Wrapper(Tensor):
    """A tensor whose numbers are elsewhere."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """No operation is needed."""
        raise NotImplementedError


def test_wrapper_tensor_is_of_the_class_and_the_form() -> None:
    """Without numbers of its own."""
    made = compat.wrapper_tensor(Wrapper, (2, 3), strides=(3, 1), dtype=torch.float64, device="cpu", requires_grad=True)
    assert (type(made), made.shape, made.dtype, made.requires_grad) == (Wrapper, (2, 3), torch.float64, True)


def test_negative_view_reads_the_same_memory_with_the_other_sign() -> None:
    """That is how files describe the imaginary part of a conjugate."""
    tensor = torch.tensor([1.0, -2.0])
    view = compat.negative_view(tensor)
    assert view.is_neg()
    assert view.tolist() == [-1.0, 2.0]
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_storage_id_tells_storages_apart() -> None:
    """The same for tensors that share memory, another for each other storage, empty ones included."""
    tensor = torch.arange(4.0)
    others = [torch.arange(4.0), torch.empty(0), torch.empty(0)]
    assert compat.storage_id(tensor.untyped_storage()) == compat.storage_id(tensor[2:].untyped_storage())
    assert len({compat.storage_id(one.untyped_storage()) for one in (tensor, *others)}) == 4


def typed() -> Any:
    """A storage that knows the type of its numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they will go
        return torch.FloatStorage([1.0, 2.0])


@pytest.mark.filterwarnings("error")
def test_untyped_storage_has_the_bytes_and_warns_of_nothing() -> None:
    """The public way warns in a user's training."""
    assert compat.untyped_storage(typed()).nbytes() == 8


def test_typed_storage_class_is_the_one_that_files_name() -> None:
    """Also for a storage of the common class, which only says its type."""
    assert compat.typed_storage_class(typed()) is torch.FloatStorage
    common = torch.storage.TypedStorage(wrap_storage=torch.UntypedStorage(8), dtype=torch.int64, _internal=True)
    assert compat.typed_storage_class(common) is torch.LongStorage


def test_storage_dtypes_are_those_of_the_classes_that_files_name() -> None:
    """A file names the class of each storage."""
    found = compat.storage_dtypes()
    assert {found[name] for name in ("FloatStorage", "BFloat16Storage", "BoolStorage")} == {
        torch.float32,
        torch.bfloat16,
        torch.bool,
    }
    assert all(isinstance(getattr(torch, name), type) for name in found)


def test_savable_dtypes_are_those_that_torch_saves() -> None:
    """Each of them comes back; what is left out is refused by torch, or has no numbers that one could save."""
    for dtype in compat.savable_dtypes() - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}:
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some experimental
            torch.save(torch.empty(2, dtype=dtype), file)
        file.seek(0)
        assert torch.load(file, weights_only=True).dtype is dtype
    assert {torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn} <= compat.savable_dtypes()


def test_load_hooks_are_what_was_registered() -> None:
    """Under the public method."""
    module = nn.Linear(1, 1)
    assert not list(compat.load_hooks(module))
    module.register_load_state_dict_pre_hook(lambda *_: None)
    assert len(list(compat.load_hooks(module))) == 1


def test_has_load_hooks_once_one_is_registered() -> None:
    """Under the public method."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    assert not compat.has_load_hooks(optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    assert compat.has_load_hooks(optimizer)


def test_mark_as_stepped_keeps_schedulers_quiet() -> None:
    """Without it a schedule that is resumed warns of steps out of order."""
    for marked in (False, True):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if marked:
            compat.mark_as_stepped(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        assert bool(caught) is not marked


def test_own_of_loaders_is_all_that_an_iteration_changes() -> None:
    """With workers that persist, and where the length of an iterable data set is asked for."""

    class Sized(torch.utils.data.IterableDataset[int]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter(range(4))

    for loader in (DataLoader(Sized()), DataLoader(range(4), num_workers=1, persistent_workers=True)):  # type: ignore[arg-type]
        before = dict(vars(loader))
        assert len(list(loader)) == len(loader)
        changed = {name for name, value in vars(loader).items() if value is not before.get(name, loader)}
        assert changed
        assert changed <= compat.OWN_OF_LOADERS
        compat.forget_workers(loader)


def test_the_parts_of_schedulers() -> None:
    """The schedulers inside ``SequentialLR`` and ``ChainedScheduler``."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    parts: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, step) for step in (2, 3)]
    assert list(compat.scheduler_parts(torch.optim.lr_scheduler.ChainedScheduler(parts))) == parts
    assert list(compat.scheduler_parts(torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1]))) == parts
    assert not compat.scheduler_parts(parts[0])


def test_multiply_each_is_in_place() -> None:
    """On every tensor."""
    tensors = [torch.ones(2), torch.full((1,), 4.0)]
    compat.multiply_each(tensors, 0.5)
    assert [one.tolist() for one in tensors] == [[0.5, 0.5], [2.0]]


class OtherLoader(DataLoader[int]):
    """A loader with an iterator of its own."""

    def _get_iterator(self) -> Any:
        return iter([1])


def test_is_iterated_by_torch_unless_a_subclass_does() -> None:
    """The iterator of a subclass is what its user wants."""
    assert compat.is_iterated_by_torch(DataLoader([1, 2]))  # type: ignore[arg-type]
    assert not compat.is_iterated_by_torch(OtherLoader([1, 2]))  # type: ignore[arg-type]
    assert list(OtherLoader([1, 2])) == [1]  # type: ignore[arg-type]


def test_forget_workers_makes_a_copy_start_its_own() -> None:
    """A copy that has the iterator of the user's loader would take batches from it."""
    loader: DataLoader[int] = DataLoader([1, 2, 3], num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    assert len(list(loader)) == 3
    own = copy.copy(loader)
    kept = vars(own)["_iterator"]
    compat.forget_workers(own)
    assert len(list(own)) == 3
    assert vars(own)["_iterator"] is not kept
    assert vars(loader)["_iterator"] is kept
    compat.forget_workers(own)
    compat.forget_workers(loader)


@pytest.fixture
def process_group() -> Any:
    """A process group of this process alone, made by hand."""
    store = torch_dist.HashStore()
    torch_dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield store
    torch_dist.destroy_process_group()


def test_default_store_is_that_of_the_process_group(process_group: Any) -> None:
    """A key of it is seen through the store that the group was made with."""
    before = process_group.num_keys()
    compat.default_store().set("a key of ours", "value")
    assert process_group.num_keys() == before + 1


def test_local_part_is_the_tensor_itself(process_group: Any) -> None:
    """Not a view of it, and no part of the graph; a plain tensor is its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()
    local = compat.local_part(tensor)
    assert local is compat.local_part(tensor)
    assert type(local) is Tensor
    assert not local.requires_grad
    assert local.tolist() == [0.0, 1.0, 2.0, 3.0]
    plain = torch.ones(1)
    assert compat.local_part(plain) is plain


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_classes_are_those_that_files_name(tmp_path: Path) -> None:
    """``.metadata`` names them, with these attributes."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.arange(3)}, checkpoint_id=tmp_path, no_dist=True)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    (place,) = index.storage_data.values()
    assert type(place) is compat.dcp_storage_info_class()
    assert compat.dcp_storage_info_class()(relative_path="a", offset=1, length=2) != place
    assert f"{type(place).__module__}.{type(place).__qualname__}" == (
        "torch.distributed.checkpoint.filesystem._StorageInfo"
    )
    kind = compat.dcp_memory_format_class()
    properties = index.state_dict_metadata["a"].properties
    assert any(type(one) is kind for one in properties.__reduce_ex__(2)[2])


def test_map_leaves_keeps_the_containers() -> None:
    """Dictionaries, lists and tuples stay, and what they hold is replaced."""
    assert compat.map_leaves(lambda leaf: leaf + 1, {"a": [1, (2, 3)]}) == {"a": [2, (3, 4)]}


def test_record_memory_history_has_its_arguments() -> None:
    """What is recorded is seen on a GPU only; the arguments are those that are given."""
    arguments = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "max_entries"} <= arguments.keys() or "args" in arguments


def test_memory_snapshot_needs_no_arguments() -> None:
    """It is called without any."""
    inspect.signature(torch.cuda.memory._snapshot).bind()


def test_observe_out_of_memory_is_there_in_builds_for_cuda() -> None:
    """A build without CUDA has no such function."""
    assert hasattr(torch._C, "_cuda_attach_out_of_memory_observer") == (torch.version.cuda is not None)


def test_with_versions_has_what_state_dict_says_of_modules() -> None:
    """Of all, by their names."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    state = model.state_dict()
    assert compat.with_versions(dict(state), model)._metadata == state._metadata  # pyright: ignore


def test_each_name_has_a_test() -> None:
    """A private name that is added to ``_torch_compat`` gets a test in this file."""
    text = Path(__file__).read_text()
    assert [name for name in compat.__all__ if f"compat.{name}" not in text and f"test_{name}" not in text] == []


def private_names(tree: ast.AST) -> set[str]:
    """The private attributes and imports, and the strings that look like one."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"_[A-Za-z]\w*[a-zA-Z0-9]_?", name)}


def of_torch(node: ast.AST) -> bool:
    """Whether it reaches into ``torch`` by a private name: ``torch._C.…``, ``from torch._utils import …``."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute):
        names = [ast.unparse(node)]
    else:
        return False
    return any(re.match(r"torch\b.*\._[A-Za-z]", name) for name in names)


def test_private_names_of_torch_are_in_one_module() -> None:
    """Else a release of torch that changes one breaks something that nobody looks at."""
    here = PACKAGE / "_torch_compat.py"
    known = private_names(ast.parse(here.read_text()))
    assert {"_cdata", "_opt_called", "_iterator"} <= known
    strays: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        if path != here:
            tree = ast.parse(path.read_text())
            strays += [f"{path}: {name}" for name in private_names(tree) & known]
            strays += [f"{path}: {ast.unparse(node)}" for node in ast.walk(tree) if of_torch(node)]
    assert not strays
