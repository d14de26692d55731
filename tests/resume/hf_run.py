"""A run of a small model of transformers, with adapters or without, that goes on from its newest checkpoint.

Run as ``hf_run.py <folder> <adapters or weights> <die>``, with ``<die>`` as ``<event>:<batch>`` or empty. The base
model of adapters comes from a seed, as it would from a hub, and not from a checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from models.hf_parts import causal_model, lora, tokenizer, trainer_of
from small_run import DieAt, Say, final_state

from composerlite import Callback, Event, Logger, State
from composerlite.models import HuggingFaceModel


class SayLoss(Say):
    """As ``Say``, for batches that are mappings."""

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = float(state.total_loss_dict["loss/train/total"])
        print(int(state.timestamp.batch), ",".join(map(str, state.batch["index"].tolist())), loss.hex(), flush=True)


def main(folder: str, kind: str, die: str = "") -> None:
    """Train as a relaunched job does."""
    torch.set_num_threads(1)
    callbacks: list[Callback] = [SayLoss()]
    if die:
        event, batch = die.split(":")
        callbacks.append(DieAt(int(batch), Event(event)))
    adapters = lora() if kind == "adapters" else None
    model = HuggingFaceModel(causal_model("llama" if adapters else "gpt2").train(), tokenizer(), peft_config=adapters)
    trainer = trainer_of(model, folder, save_interval="3ba", autoresume=True, callbacks=callbacks)
    trainer.fit()
    trainer.close()
    torch.save(final_state(trainer), Path(folder) / "final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
