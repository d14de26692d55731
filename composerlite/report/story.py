"""Story of a run, in words."""

from __future__ import annotations

from composerlite.checkpoint.record.manifest import bytes_text
from composerlite.report.facts import Facts
from composerlite.report.timeline import ENDS
from composerlite.report.words import count, duration, number, share

__all__ = ["HOW_TO_GET_A_RECORD", "missing", "sentences", "tiles", "title_of"]

HOW_TO_GET_A_RECORD = (
    "Give the Trainer loggers=JSONLLogger(), or a YAML run 'loggers: {jsonl: }': it keeps the record in the folder of "
    "the checkpoints."
)


def title_of(facts: Facts) -> str:
    """The name of the run; if it has none, where it is."""
    return facts.run_name or ", ".join(facts.places)


def sentences(facts: Facts) -> list[str]:
    """A few sentences."""
    if not facts.launches:
        return _from_manifests(facts)
    said = [_training(facts), _launches(facts), _lost(facts), _saves(facts), _goodput(facts), _storage(facts)]
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


def _goodput(facts: Facts) -> str:
    if facts.goodput is None:
        return ""
    return f"{share(facts.goodput, 1.0)} of the wall time was training that counts (goodput)."


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
    """The numbers at the top: what, how much, and something about it."""
    found: list[tuple[str, str, str]] = []
    if facts.last_batch is not None:
        found.append(("Batches", number(facts.last_batch), f"of {facts.max_duration}" if facts.max_duration else ""))
    if facts.launches:
        kills = count(facts.kills, "kill") if facts.kills else "none killed"
        lost = duration(facts.seconds["lost"])
        found += [
            ("Wall time", duration(facts.wall_seconds), ""),
            ("Launches", number(len(facts.launches)), kills),
            ("Lost work", number(facts.lost_batches), f"batches, {lost}" if facts.lost_batches else "batches"),
        ]
        stalls = sum(save.stall_seconds or 0.0 for save in facts.saves)
        found.append(("Stalls of saves", duration(stalls), share(stalls, facts.wall_seconds)))
        if facts.goodput is not None:
            found.append(("Goodput", share(facts.goodput, 1.0), "training that counts"))
    if facts.stored:
        committed = facts.committed
        what = "checkpoint" if len(committed) == 1 else "checkpoints"
        found.append(
            ("Kept", number(len(committed)), f"{what}, {bytes_text(sum(one.size_bytes for one in committed))}")
        )
    return found
