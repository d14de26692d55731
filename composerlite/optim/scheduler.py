"""ComposerScheduler: a learning-rate schedule as a function of where training stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch.optim.lr_scheduler import LambdaLR

from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.core import State

__all__ = ["ComposerScheduler", "compile_composer_scheduler"]


@runtime_checkable
class ComposerScheduler(Protocol):
    """A learning-rate schedule: the factor that the initial learning rate is multiplied by.

    The factor depends on ``state.timestamp`` and ``state.max_duration`` only, so a resumed run goes on exactly. Any
    function ``(state, ssr=1.0) -> float`` is one.
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """The factor now.

        Args:
            state: the training state.
            ssr: scale schedule ratio: all times but fractions of training are multiplied by it.
        """
        ...


def compile_composer_scheduler(scheduler: ComposerScheduler, state: State, ssr: float = 1.0) -> LambdaLR:
    """``scheduler`` as a torch scheduler of the optimizer of ``state``.

    Its ``step()`` sets the learning rate for where ``state`` stands then: call it after the timestamp has advanced. The
    data loader must be set in ``state`` before, or schedules in epochs move once per epoch only.

    Raises:
        ConfigError: ``state`` has not exactly one optimizer, ``ssr`` is not positive, or the schedule is in ``dur``
            and ``state`` has no ``max_duration``.
    """
    if len(state.optimizers) != 1:
        raise ConfigError(f"a scheduler needs exactly one optimizer, and there are {len(state.optimizers)}.")
    if not ssr > 0:
        raise ConfigError(f"scale_schedule_ratio={ssr}: want a number above zero; 1.0 leaves the schedule as it is.")

    def factor(_steps: int) -> float:
        return scheduler(state, ssr)

    return LambdaLR(state.optimizers[0], factor)
