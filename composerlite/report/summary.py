"""Summarize a run in sentences and key numbers."""

from __future__ import annotations

import statistics
from collections import Counter

from composerlite.errors import bytes_text
from composerlite.report.facts import Facts
from composerlite.report.formats import count, duration, number, share

HOW_TO_GET_A_RECORD = (
    "Pass loggers=JSONLLogger() to the Trainer, or in YAML 'loggers: {jsonl: }', to write a record into the folder of "
    "the checkpoints."
)
ENDS = {
    "finished": "finished",
    "interrupted": "preempted",
    "error": "failed with an error",
    "closed": "closed before the end of training",
    "killed": "killed",
    "running": "still running or killed",
}


def title_of(facts: Facts) -> str:
    """Return the name of the run, or the searched places for a run without a name."""
    return facts.run_name or ", ".join(facts.places)


def summarize(facts: Facts) -> list[str]:
    """Summarize a run in sentences, for a terminal."""
    sentences = story(facts)
    if facts.goodput is not None:
        sentences.append(f"Goodput: {share(facts.goodput)} of the wall time was training that counts.")
    return sentences


def story(facts: Facts) -> list[str]:
    """Summarize a run in sentences, without the numbers of :func:`key_numbers`."""
    sentences: list[str] = []
    if facts.launches:
        sentences += _training(facts)
        states = Counter(save.state for save in facts.saves)
        states["uploaded"] = sum(save.is_uploaded for save in facts.saves)
        parts = [f"{states[state]} {state}" for state in ("uploaded", "failed", "cut off", "deleted") if states[state]]
        stalls = sum(save.stall_seconds or 0.0 for save in facts.saves)
        text = f"{count(len(facts.saves), 'save')} ({', '.join(parts)})" if parts else count(len(facts.saves), "save")
        sentences.append(f"{text}; training waited {duration(stalls)} for saves ({share(stalls, facts.wall_seconds)}).")
        held_up = [save for save in facts.saves if save.is_held_up]
        if held_up:
            rank, times = Counter(save.slowest_rank for save in held_up).most_common(1)[0]
            longest = max(save.straggler_seconds for save in held_up if save.slowest_rank == rank)
            compared = sum(save.slowest_rank is not None for save in facts.saves)
            sentences.append(
                f"Rank {rank} held up {number(times)} of {count(compared, 'save')}: its writes took up to "
                f"{duration(longest)} longer than the median of the other ranks."
            )
    elif not facts.committed:
        return ["There is no committed checkpoint."]
    else:
        sentences.append(f"The newest checkpoint is of batch {number(facts.last_batch or 0)}.")
    for where, name in (("local", "folder"), ("remote", "bucket")):
        sizes = [one.size_bytes for one in facts.committed if one.where == where]
        if sizes:
            sentences.append(f"The {name} has {count(len(sizes), 'checkpoint')} of {bytes_text(sum(sizes))}.")
    return sentences


def _training(facts: Facts) -> list[str]:
    """Describe the progress, the launches and the lost work."""
    begun = facts.launches[0].first_batch
    start = f" from batch {number(begun)}" if begun else ""
    last, wall = number(facts.last_batch or 0), duration(facts.wall_seconds)
    aim = str(facts.launches[-1].setting.get("max_duration", ""))
    if facts.status == "finished":
        until = f" ({aim})" if aim else ""
        sentences = [f"The run trained{start} to its end, batch {last}{until}, in {wall}."]
    else:
        sentences = [f"The run trained{start} to batch {last}{f' of {aim}' if aim else ''} in {wall}."]
    ends = [launch.end for launch in facts.launches]
    if len(ends) == 1:
        return [*sentences, f"There was one launch: {ENDS.get(ends[0], ends[0])}."]
    parts = ", ".join(f"{number(many)} {ENDS.get(end, end)}" for end, many in Counter(ends).items())
    sentences.append(f"There were {number(len(ends))} launches: {parts}.")
    if facts.lost_batches:
        lost = facts.seconds["lost"]
        sentences.append(
            f"{count(facts.lost_batches, 'batch', 'batches')} trained twice: {duration(lost)} lost "
            f"({share(lost, facts.wall_seconds)} of the wall time)."
        )
    else:
        sentences.append("No work was lost: each launch resumed from the last batch of the launch before.")
    return sentences


def missing(facts: Facts) -> list[str]:
    """Return notes on missing facts, each with a remedy."""
    notes: list[str] = []
    if facts.record is None:
        notes.append(
            "There is no record of this run: launches, lost work, curves and uploads are unknown. "
            + HOW_TO_GET_A_RECORD
        )
    if facts.record is not None and not facts.stored:
        notes.append(
            "No checkpoints were found. To list checkpoints, name their folder or URI, too: "
            "composerlite report RECORD s3://bucket/run."
        )
    if facts.other_runs:
        notes.append(f"There are other runs; select one with --run: {', '.join(facts.other_runs)}.")
    return notes


def key_numbers(facts: Facts) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page: name, value, remark."""
    found: list[tuple[str, str, str]] = []
    if facts.goodput is not None:
        found.append(("Goodput", share(facts.goodput), "training that counts"))
        batches = sum(max(0, one.last_batch - one.first_batch - one.lost_batches) for one in facts.launches)
        if batches and facts.seconds["training"] > 0:
            found.append(("Throughput", f"{number(batches / facts.seconds['training'])}/s", "batches, while training"))
    for is_shown in (
        lambda name: name.startswith("loss/"),
        lambda name: name.startswith("metrics/") and not name.startswith("metrics/train/"),
    ):
        series = next((one for one in facts.metrics if is_shown(one.name) and one.finite), None)
        if series is not None:
            values = [value for _, value in series.finite]
            between = f"{number(min(values))} to {number(max(values))}"
            found.append((series.name.removeprefix("metrics/"), number(values[-1]), between))
    stalls = [save.stall_seconds for save in facts.saves if save.stall_seconds is not None]
    if stalls:
        found.append(("Longest stall", duration(max(stalls)), f"median {duration(statistics.median(stalls))}"))
    if facts.committed:
        newest = max(facts.committed, key=lambda one: one.saved_at or 0.0)
        epoch = "" if newest.epoch is None else f"epoch {number(newest.epoch)}"
        found.append(("Newest checkpoint", bytes_text(newest.size_bytes), epoch))
    return found
