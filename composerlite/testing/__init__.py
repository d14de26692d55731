"""Tools to test custom stores and callbacks. Needs pytest; no other module of composerlite imports this package."""

from composerlite.testing.cluster import RankOutcome, run_ranks, run_ranks_to_the_end
from composerlite.testing.contracts import ObjectStoreContract
from composerlite.testing.faults import FaultProxy, NetworkFaults
from composerlite.testing.faulty_store import Fault, FaultyStore

__all__ = [
    "Fault",
    "FaultProxy",
    "FaultyStore",
    "NetworkFaults",
    "ObjectStoreContract",
    "RankOutcome",
    "run_ranks",
    "run_ranks_to_the_end",
]
