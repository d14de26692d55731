"""Summary of a run, in sentences."""

from __future__ import annotations

import math
import statistics
from collections import Counter

from composerlite.errors import bytes_text
from composerlite.report.facts import Facts, Series
from composerlite.report.timeline import ENDS
from composerlite.report.words import count, duration, number, share

HOW_TO_GET_A_RECORD = (
    "Give the Trainer loggers=JSONLLogger(), or a YAML run 'loggers: {jsonl: }': it keeps the record in the folder of "
    "the checkpoints."
)


def title_of(facts: Facts) -> str:
    """The name of the run; if it has none, where it is."""
    return facts.run_name or ", ".join(facts.places)


def sentences(facts: Facts) -> list[str]:
    """Summary of the run, for a terminal: the story and the goodput."""
    return [*story(facts), *([_goodput(facts)] if facts.launches and facts.goodput is not None else [])]


def story(facts: Facts) -> list[str]:
    """Summary of the run, beside the numbers of :func:`tiles`."""
    if not facts.launches:
        return _from_manifests(facts)
    said = [_training(facts), _launches(facts), _lost(facts), _saves(facts), _straggler(facts), _storage(facts)]
    return [sentence for sentence in said if sentence]


def _training(facts: Facts) -> str:
    last, wall = number(facts.last_batch or 0), duration(facts.wall_seconds)
    begun = facts.launches[0].first_batch
    start = f" from batch {number(begun)}" if begun else ""
    if facts.status == "finished":
        until = f", {facts.max_duration}," if facts.max_duration else ""
        return f"The run trained{start} to its end, batch {last}{until} in {wall}."
    aim = f"; it was to train {facts.max_duration}" if facts.max_duration else ""
    verb = "has come" if facts.status == "running" else "came"
    return f"The run {verb}{start} to batch {last} in {wall}{aim}."


def _launches(facts: Facts) -> str:
    ends = [launch.end for launch in facts.launches]
    kinds = [("killed", "was killed", "were killed"), ("interrupted", "was preempted", "were preempted")]
    kinds += [
        ("error", "ended with an error", "ended with errors"),
        ("closed", "was closed early", "were closed early"),
    ]
    parts = [
        f"{number(ends.count(kind))} {one if ends.count(kind) == 1 else more}"
        for kind, one, more in kinds
        if kind in ends
    ]
    last = f"the last {ENDS[ends[-1]]}" if ends[-1] in ("finished", "running") else ""
    rest = "; ".join(part for part in (", ".join(parts), last) if part)
    if len(ends) == 1:
        return f"It took one launch, which {ENDS.get(ends[0], ends[0])}."
    return f"It took {count(len(ends), 'launch', 'launches')}: {rest}."


def _lost(facts: Facts) -> str:
    if len(facts.launches) == 1:
        return ""
    if not facts.lost_batches:
        return "No work was lost: every launch resumed from the batch that the one before had reached."
    lost = facts.seconds["lost"]
    return (
        f"{count(facts.lost_batches, 'batch', 'batches')} were trained twice, {duration(lost)} of work "
        f"({share(lost, facts.wall_seconds)} of the wall time)."
    )


def _saves(facts: Facts) -> str:
    done = [save for save in facts.saves if save.state in ("committed", "deleted")]
    failed = sum(save.state == "failed" for save in facts.saves)
    cut = sum(save.state == "cut off" for save in facts.saves)
    stalls = sum(save.stall_seconds or 0.0 for save in done)
    text = f"{count(len(done), 'checkpoint was', 'checkpoints were')} saved"
    if done and facts.wall_seconds > 0:
        text += f", and kept training waiting for {duration(stalls)} in all ({share(stalls, facts.wall_seconds)})"
    if uploaded := sum(save.is_uploaded for save in facts.saves):
        text += f"; {number(uploaded)} were uploaded" if uploaded > 1 else "; 1 was uploaded"
    text += f"; {count(failed, 'save')} failed" if failed else ""
    text += (
        f"; {count(cut, 'save was', 'saves were')} cut off by a kill, which costs nothing but the time" if cut else ""
    )
    return f"{text}."


def _straggler(facts: Facts) -> str:
    """The rank that held up saves most often."""
    held_up = [save for save in facts.saves if save.is_held_up]
    if not held_up:
        return ""
    rank, times = Counter(save.slowest_rank for save in held_up).most_common(1)[0]
    longest = max(save.straggler_seconds for save in held_up if save.slowest_rank == rank)
    compared = sum(save.slowest_rank is not None for save in facts.saves)
    return (
        f"Rank {rank} held up {number(times)} of {count(compared, 'save')}: it wrote up to {duration(longest)} longer "
        f"than the median of the others. Training waited {duration(facts.seconds['straggler'])} for slow ranks."
    )


def _goodput(facts: Facts) -> str:
    return f"{share(facts.goodput or 0.0, 1.0)} of the wall time was training that counts (goodput)."


def _storage(facts: Facts) -> str:
    parts: list[str] = []
    for where, name in (("local", "in the folder"), ("remote", "in the bucket")):
        there = [one for one in facts.committed if one.where == where]
        if there:
            what = count(len(there), "checkpoint")
            parts.append(f"{what} of {bytes_text(sum(one.size_bytes for one in there))} {name}")
    verb = "is" if parts and parts[0].startswith("1 ") else "are"
    return f"There {verb} {' and '.join(parts)} now." if parts else ""


def _from_manifests(facts: Facts) -> list[str]:
    if not facts.committed:
        return ["There is no committed checkpoint."]
    newest = max(one.batch or 0 for one in facts.committed)
    names = {one.name.rpartition("/")[2] for one in facts.committed}
    what = f"{count(len(names), 'checkpoint')} of this run, the newest of batch {number(newest)}"
    return [f"There {'is' if len(names) == 1 else 'are'} {what}.", _storage(facts)]


def missing(facts: Facts) -> list[str]:
    """List the gaps in the report, and a remedy for each."""
    notes: list[str] = []
    if facts.record is None:
        notes.append(
            "There is no record of this run here: launches, kills, lost work, curves and uploads are not known. "
            + HOW_TO_GET_A_RECORD
        )
    elif not any(line.points for line in facts.metrics):
        notes.append("The record has no metrics: no batch was done, or all of them were lost with the machine.")
    if facts.record is not None and not facts.stored:
        notes.append(
            "No checkpoints were looked at. To list those that are kept, name their folder or URI as well: "
            "composerlite report RECORD s3://bucket/run."
        )
    if facts.other_runs:
        notes.append(f"There are other runs as well; --run chooses: {', '.join(facts.other_runs)}.")
    return notes


def tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """The numbers at the top, none of which is in :func:`story`: what, how much, and something about it."""
    found: list[tuple[str, str, str]] = []
    if facts.goodput is not None:
        found.append(("Goodput", share(facts.goodput, 1.0), "training that counts"))
        batches = sum(max(0, one.last_batch - one.first_batch - one.lost_batches) for one in facts.launches)
        if batches and facts.seconds["training"] > 0:
            found.append(("Throughput", f"{number(batches / facts.seconds['training'])}/s", "batches, while training"))
    for series in _headline(facts):
        values = [point.value for point in series.kept if math.isfinite(point.value)]
        lowest, highest = number(min(values)), number(max(values))
        found.append((series.name.removeprefix("metrics/"), number(values[-1]), f"{lowest} to {highest}"))
    stalls = [save.stall_seconds for save in facts.saves if save.stall_seconds is not None]
    if stalls:
        found.append(("Longest stall", duration(max(stalls)), f"median {duration(statistics.median(stalls))}"))
    newest = max(facts.committed, key=lambda one: one.saved_at or 0.0, default=None)
    if newest is not None:
        epoch = "" if newest.epoch is None else f"epoch {number(newest.epoch)}"
        found.append(("Newest checkpoint", bytes_text(newest.size_bytes), epoch))
    return found


def _headline(facts: Facts) -> list[Series]:
    """The loss and the first metric of an evaluation, where they have values."""
    known = [one for one in facts.metrics if any(math.isfinite(point.value) for point in one.kept)]
    loss = next((one for one in known if one.name.startswith("loss/")), None)
    metric = next(
        (one for one in known if one.name.startswith("metrics/") and not one.name.startswith("metrics/train/")), None
    )
    return [one for one in (loss, metric) if one is not None]
