"""Documented import path of seeding and generator states, from ``composerlite.core`` and ``.devices``."""

from composerlite.core import seed_all
from composerlite.core.numerics import MAX_SEED, configure_deterministic_mode, get_random_seed, seed_context
from composerlite.devices.rng import capture as get_rng_state
from composerlite.devices.rng import restore as load_rng_state

__all__ = [
    "MAX_SEED",
    "configure_deterministic_mode",
    "get_random_seed",
    "get_rng_state",
    "load_rng_state",
    "seed_all",
    "seed_context",
]
