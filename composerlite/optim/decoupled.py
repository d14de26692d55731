"""SGD and Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from composerlite._torch_compat import multiply_each
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)

Params: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]"
_HIGH_DECAY = 1e-3


class _DecoupledOptimizer(Optimizer, ABC):
    """Base of both optimizers.

    A step first multiplies each weight by ``1 - weight_decay × lr / initial_lr``, then moves the weight along the
    gradient. Nothing changes for parameters without a gradient, or with ``lr=0``.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the current ``lr`` as ``initial_lr`` for the weight decay."""
        super().add_param_group(param_group)
        self._keep_initial_lr()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keep_initial_lr()  # missing in the state of torch optimizers without schedule

    def _keep_initial_lr(self) -> None:
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares overloads
        """Step all groups. Returns the result of ``closure``, a function to compute the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                _decay(params, group)
                self._update(params, [p.grad for p in params], group)
        return loss

    @abstractmethod
    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """Move ``params`` along ``grads``, without decay."""


def _decay(params: list[Tensor], group: dict[str, Any]) -> None:
    lr, initial_lr = group["lr"], group["initial_lr"]
    if group["weight_decay"] == 0 or lr == 0:
        return
    scale = lr / initial_lr if initial_lr != 0 else 1.0
    multiply_each(params, 1 - scale * group["weight_decay"])


@final
class DecoupledSGDW(_DecoupledOptimizer):
    """SGD with momentum and decoupled weight decay (`Loshchilov & Hutter 2019 <https://arxiv.org/abs/1711.05101>`_).

    The decay of a step is ``weight_decay × lr / initial_lr``: the schedule scales the decay, the peak learning rate
    does not. To convert the ``weight_decay`` of ``torch.optim.SGD``, multiply by the learning rate.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: share of the last update in the next update.
        dampening: reduction of the gradient in the momentum.
        weight_decay: decrease of each weight per step at the initial learning rate, as a fraction.
        nesterov: use Nesterov momentum; needs ``momentum`` and no ``dampening``.

    Raises:
        ConfigError: a value is negative, or ``nesterov`` without ``momentum``.
    """

    @checked_arguments
    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        _check(self, lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"DecoupledSGDW(nesterov=True, momentum={momentum}, dampening={dampening}): Nesterov momentum needs "
                "momentum > 0 and dampening=0."
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
        )

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        keeps = group["momentum"] != 0
        buffers: list[Tensor | None] = [self.state[p].get("momentum_buffer") if keeps else None for p in params]
        sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=any(grad.is_sparse for grad in grads),
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        if keeps:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer


@final
class DecoupledAdamW(_DecoupledOptimizer):
    """Adam with decoupled weight decay (`Loshchilov & Hutter 2019 <https://arxiv.org/abs/1711.05101>`_).

    The decay of a step is ``weight_decay × lr / initial_lr``: the schedule scales the decay, the peak learning rate
    does not. To convert the ``weight_decay`` of ``torch.optim.AdamW``, multiply by the learning rate.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the running means of gradient and squared gradient.
        eps: number added to the denominator.
        weight_decay: decrease of each weight per step at the initial learning rate, as a fraction.
        amsgrad: divide by the largest second moment so far (`Reddi et al. 2018 <https://openreview.net/forum?id=ryQu7f-RZ>`_).

    Raises:
        ConfigError: a value is negative, or a beta is not in [0, 1).
    """

    @checked_arguments
    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
    ) -> None:
        _check(self, lr=lr, eps=eps, weight_decay=weight_decay)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"DecoupledAdamW(betas={betas}): expected two numbers in [0, 1), such as (0.9, 0.95).")
        defaults = {
            "lr": lr,
            "betas": (betas[0], betas[1]),  # YAML gives a list
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults)

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        amsgrad: bool = group["amsgrad"]
        states = [self._adam_state(p, amsgrad=amsgrad) for p in params]
        beta1, beta2 = group["betas"]
        adam(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if amsgrad else [],
            [state["step"] for state in states],
            has_complex=any(p.is_complex() for p in params),
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )

    def _adam_state(self, param: Tensor, *, amsgrad: bool) -> dict[str, Tensor]:
        """Return the state of ``param``, with the keys of ``torch.optim.AdamW`` for exchange of checkpoints."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _check(optimizer: Optimizer, **values: float) -> None:
    name = type(optimizer).__name__
    for argument, value in values.items():
        if not value >= 0:
            raise ConfigError(f"{name}({argument}={value}): expected zero or more.")
    if values["weight_decay"] >= _HIGH_DECAY:
        log.warning(
            "%s(weight_decay=%g) is high: unlike in torch.optim, the decay is not multiplied by the learning rate. "
            "Typical values are 1e-6 to 1e-4",
            name,
            values["weight_decay"],
        )
