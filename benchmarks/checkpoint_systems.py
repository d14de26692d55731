"""The run whose state is saved, and the systems that save it: each as its own documentation says, with its defaults.

A system gets a :class:`Run` and saves its model and optimizer, weights and state. Whatever a user would do once, before
the first save, its constructor and :meth:`System.prepare` do.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from measure import only_installed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["SYSTEMS", "Pending", "Run", "System"]

BATCH_SIZE = 16
LEARNING_RATE = 1e-5
TIMEOUT = 300.0


class Network(nn.Module):
    """Linear layers with residual connections, so that gradients keep their size through any number of layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Features of shape (batch, width), as ``x``."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class Run:
    """A model in training with AdamW, everything in fp32, that has made its first step.

    Attributes:
        waited_seconds: how long the last step of the optimizer waited for a save.
    """

    def __init__(self, layers: int, width: int = 2048) -> None:
        torch.manual_seed(0)
        self.model = Network(layers, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.batch = torch.randn(BATCH_SIZE, width)
        self.waited_seconds = 0.0
        self._started = 0.0
        self.optimizer.register_step_pre_hook(self._note_start)
        self._last_hook = self.optimizer.register_step_pre_hook(self._note_wait)
        self.step(contextlib.nullcontext())

    def step(self, guard: AbstractContextManager[Any]) -> None:
        """One step of training. The optimizer steps within ``guard``."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        start = time.perf_counter()
        with guard:
            entered = time.perf_counter()
            self.optimizer.step()
        self.waited_seconds += entered - start

    def _note_start(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _note_wait(self, *_: object) -> None:
        self.waited_seconds = time.perf_counter() - self._started

    def watch_step(self) -> None:
        """Have whatever hooked into the optimizer's step so far count as waiting in the next ones."""
        self._last_hook.remove()
        self._last_hook = self.optimizer.register_step_pre_hook(self._note_wait)

    def free_gradients(self) -> None:
        """Let go of what is no state."""
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        """All tensors of the state, as they are now: a resume may put others in their place."""
        states = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return [*self.model.parameters(), *(tensor for tensor in states if isinstance(tensor, Tensor))]

    def state_dicts(self) -> dict[str, Any]:
        """The state, as ``torch.save`` takes it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dicts(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dicts`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def spoil(self) -> Callable[[], None]:
        """Change the first and the last tensor; call what is returned after a resume to see that they are back."""
        kept = [tensor.clone() for tensor in (self.tensors()[0], self.tensors()[-1])]
        for tensor in (self.tensors()[0], self.tensors()[-1]):
            tensor.add_(1)

        def check() -> None:
            now = (self.tensors()[0], self.tensors()[-1])
            assert all(map(torch.equal, kept, now)), "the state that was loaded is not the one that was saved"

        return check


@dataclass(frozen=True)
class Pending:
    """A save that goes on behind training: whether it has ended, and how to wait for it and raise what went wrong."""

    done: Callable[[], bool]
    wait: Callable[[], object]


class System(ABC):
    """How one system saves the model and optimizer of ``run`` to a path and reads them back.

    Attributes:
        distribution: name of its package.
        in_training: its ways of saving behind training, the usual one last. ``async``: the state is copied before
            training goes on. ``lazy``: while it does, until the optimizer's next step.
        flushes: whether a save that has ended is on the disk. Where not, the benchmark flushes its files.
        begins_anew: whether the next save after :meth:`release` is a first one again.
    """

    distribution: ClassVar[str]
    in_training: ClassVar[tuple[str, ...]] = ()
    flushes: ClassVar[bool] = False
    begins_anew: ClassVar[bool] = False

    def __init__(self, run: Run) -> None:
        self.run = run

    @abstractmethod
    def save(self, path: Path) -> None:
        """Save to ``path``, which does not exist, and return when the system calls it done."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Restore the run from ``path``."""

    def prepare(self, way: str) -> None:
        """Get ready what can be got ready before the first save that is ``way``."""

    def start(self, path: Path, way: str) -> Pending:
        """Save to ``path`` behind training, in one of its ways."""
        raise NotImplementedError

    def step_guard(self) -> AbstractContextManager[Any]:
        """What the optimizer has to step in."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """End what :meth:`prepare` got ready."""

    def flush(self, path: Path) -> None:
        """Make the files of ``path`` durable, if the system did not."""
        if self.flushes:
            return
        for entry in (path.parent, path, *path.rglob("*")):
            file = os.open(entry, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


class Composerlite(System):
    """The saves of a Trainer."""

    distribution = "composerlite"
    in_training = ("async",)
    flushes = True
    begins_anew = True

    def __init__(self, run: Run) -> None:
        from composerlite import State
        from composerlite.checkpoint.save.snapshot import StagingMemory

        super().__init__(run)
        self.state = State(
            run.model, rank_zero_seed=0, run_name="run", device=torch.device("cpu"), optimizers=run.optimizer
        )
        self.staging = StagingMemory()

    def _request(self, path: Path) -> Any:
        from composerlite.checkpoint import Catalog
        from composerlite.checkpoint.save.form import SaveRequest

        return SaveRequest(state=self.state, catalog=Catalog(path.parent), template=path.name)

    def save(self, path: Path) -> None:
        self.begin(self._request(path), "sync").wait(TIMEOUT)

    def begin(self, request: Any, how: str = "async") -> Any:
        """Begin a save."""
        from composerlite.checkpoint.save.save import begin_save

        return begin_save(request, self.staging, how=how)

    def prepare(self, way: str) -> None:
        from composerlite.checkpoint.save.form import Form

        request = self._request(Path("checkpoint"))
        size_bytes = Form(self.state).expected_bytes(request.gathered(self.state.state_dict()))
        assert size_bytes is not None
        self.staging.prepare(size_bytes)
        assert self.staging.wait_until_prepared(TIMEOUT)

    def start(self, path: Path, way: str) -> Pending:
        saved = self.begin(self._request(path), way)
        return Pending(lambda: saved.done, lambda: saved.wait(TIMEOUT))

    def load(self, path: Path) -> None:
        from composerlite.checkpoint import load_checkpoint

        load_checkpoint(path, self.state, progress_bar=False)

    def release(self) -> None:
        self.staging.close()


class TorchSave(System):
    """``torch.save`` of the state dicts."""

    distribution = "torch"

    def save(self, path: Path) -> None:
        torch.save(self.run.state_dicts(), path)

    def load(self, path: Path) -> None:
        self.run.load_state_dicts(torch.load(path, weights_only=True))


class Lightning(System):
    """``Trainer.save_checkpoint``, and what ``fit(ckpt_path=…)`` reads of it."""

    distribution = "lightning"

    def __init__(self, run: Run) -> None:
        from lightning import LightningModule, Trainer

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = run.model

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self.model(batch[0]).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return run.optimizer

        super().__init__(run)
        self.trainer = Trainer(
            max_steps=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.trainer.fit(Module(), DataLoader(TensorDataset(run.batch[None]), batch_size=None))

    def save(self, path: Path) -> None:
        self.trainer.save_checkpoint(path)

    def load(self, path: Path) -> None:
        checkpoint = self.trainer.strategy.load_checkpoint(path, weights_only=True)
        self.trainer.strategy.load_model_state_dict(checkpoint)
        self.trainer.strategy.load_optimizer_state_dict(checkpoint)


class TorchDcp(System):
    """``torch.distributed.checkpoint`` in one process."""

    distribution = "torch"
    in_training = ("async",)
    flushes = True

    def __init__(self, run: Run) -> None:
        import torch.distributed.checkpoint as dcp
        import torch.distributed.checkpoint.state_dict as state_dicts

        super().__init__(run)
        self.dcp, self.state_dicts = dcp, state_dicts

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.state_dicts.get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        self.dcp.save(self._state(), checkpoint_id=path)

    def start(self, path: Path, way: str) -> Pending:
        future: Any = self.dcp.async_save(self._state(), checkpoint_id=path)
        return Pending(future.done, lambda: future.result(TIMEOUT))

    def load(self, path: Path) -> None:
        state = self._state()
        self.dcp.load(state, checkpoint_id=path)
        self.state_dicts.set_state_dict(
            self.run.model,
            self.run.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class OlmoCore(System):
    """``save_model_and_optim_state`` and its asynchronous sister, in one process."""

    distribution = "ai2-olmo-core"
    in_training = ("async",)
    flushes = True

    def __init__(self, run: Run) -> None:
        import olmo_core.distributed.checkpoint as olmo

        super().__init__(run)
        self.olmo = olmo

    def save(self, path: Path) -> None:
        self.olmo.save_model_and_optim_state(path, self.run.model, self.run.optimizer)

    def start(self, path: Path, way: str) -> Pending:
        future = self.olmo.async_save_model_and_optim_state(path, self.run.model, self.run.optimizer)
        return Pending(future.done, lambda: future.result(TIMEOUT))

    def load(self, path: Path) -> None:
        self.olmo.load_model_and_optim_state(path, self.run.model, self.run.optimizer)


class TorchCheckpointing(System):
    """``CheckpointManager``, with the settings that its documentation gives for processes without a GPU.

    Its direct I/O is off: it fails on file systems that want the last block aligned, ext4 for one.
    """

    distribution = "torch_checkpointing"
    begins_anew = True
    in_training = ("lazy",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._manager = self._build(None)

    def _build(self, way: str | None) -> Any:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        if way is None:
            saver: Any = SyncCheckpointSaverConfig()
        else:
            staging = CheckpointStagerConfig(
                use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=way == "lazy"
            )
            saver = AsyncCheckpointSaverConfig(staging_config=staging)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        return CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))

    def save(self, path: Path) -> None:
        self._manager.save(str(path), self.run.state_dicts())

    def prepare(self, way: str) -> None:
        self._manager.close()
        self._manager = self._build(way)
        self._manager._saver._checkpoint_process.wait_for_init()  # in a real run that is long done at the first save
        self._manager.prewarm_staging(self.run.state_dicts())

    def start(self, path: Path, way: str) -> Pending:
        future = self._manager.save(str(path), self.run.state_dicts())
        return Pending(future.done, lambda: future.result(TIMEOUT))

    def load(self, path: Path) -> None:
        into = {"model": self.run.model.state_dict(), "optimizer": None}
        self.run.optimizer.load_state_dict(self._manager.load(str(path), into=into)["optimizer"])

    def step_guard(self) -> AbstractContextManager[Any]:
        return self._manager.lock()

    def release(self) -> None:
        self._manager.close()
        self._manager = self._build(None)


SYSTEMS = only_installed(
    {
        "composerlite": Composerlite,
        "torch.save": TorchSave,
        "torch DCP": TorchDcp,
        "Lightning": Lightning,
        "OLMo-core": OlmoCore,
        "torch_checkpointing": TorchCheckpointing,
    }
)
