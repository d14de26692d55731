"""ComposerNames: the names by which scripts of Composer ask a state."""

from __future__ import annotations

from composerlite import dist
from composerlite.core.parallelism import FSDPConfig, TPConfig
from composerlite.core.state.model_state import model_state
from composerlite.core.state.optimizer_state import named_optimizer_state
from composerlite.core.state.run_state import RunState, by_class
from composerlite.types import StateDict

__all__ = ["ComposerNames"]


class ComposerNames(RunState):
    """A :class:`RunState` with the attributes of Composer's state that say the same in other words."""

    precision_config = None
    """Settings of FP8, which nothing is trained in here."""

    @property
    def is_model_ddp(self) -> bool:
        """True if ``model`` is wrapped in ``DistributedDataParallel``: never, the trainer keeps the wrapper."""
        return False

    @property
    def fsdp_config(self) -> FSDPConfig | None:
        """The configuration of FSDP; ``None`` without."""
        return None if self.parallelism is None else self.parallelism.fsdp

    @property
    def tp_config(self) -> TPConfig | None:
        """The configuration of tensor parallelism; ``None`` without."""
        return None if self.parallelism is None else self.parallelism.tp

    @property
    def fsdp_config_version(self) -> int:
        """2 with FSDP, which is torch's ``fully_shard``, and 0 without."""
        return 0 if self.fsdp_config is None else 2

    @property
    def fsdp_enabled(self) -> bool:
        """True if the parameters of the model are distributed over the ranks."""
        return self.fsdp_config is not None and any(map(dist.is_distributed_tensor, self.model.parameters()))

    @property
    def fsdp_state_dict_type(self) -> str | None:
        """Layout of checkpoints with FSDP, ``'full'`` or ``'sharded'``; ``None`` without."""
        return self.sharding if self.fsdp_enabled else None

    @property
    def fsdp_sharded_state_dict_enabled(self) -> bool:
        """True if checkpoints are directories that every rank writes a part of."""
        return self.fsdp_state_dict_type == "sharded"

    @property
    def load_monolith_rank0_only(self) -> bool:
        """True if global rank 0 alone reads a checkpoint that is one file."""
        return self.fsdp_config is not None and self.fsdp_config.load_monolith_rank0_only

    def get_model_state_dict(self) -> StateDict:
        """Return the weights by name, as a checkpoint holds them under ``state/model``."""
        return model_state(self.model)

    def get_optim_state_dict(self) -> StateDict:
        """Return the state of the optimizer by the name of its class, as a checkpoint holds it."""
        return {name: named_optimizer_state(one, self.model) for name, one in by_class(self.optimizers).items()}
