"""Names of checkpoints: the only place that formats or parses them."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, final

from composerlite.checkpoint.format import SUFFIX
from composerlite.checkpoint.format.packing import format_of
from composerlite.errors import CheckpointExistsError, ConfigError, did_you_mean

__all__ = [
    "DIST_VARIABLES",
    "FIRST_RANK",
    "TIME_VARIABLES",
    "NamedState",
    "PartialFilePath",
    "TimestampLike",
    "archive_template",
    "check_template",
    "check_variables",
    "data_file_id",
    "directory_template",
    "ensure_no_conflict",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_save_filename",
    "name_pattern",
    "root_and_template",
    "variables_in",
]

DIST_VARIABLES = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
"""What a folder name may contain."""

FIRST_RANK: Mapping[str, int] = {"rank": 0, "local_rank": 0, "node_rank": 0}
"""The variables by which ranks differ, as they are on rank 0: several ranks' checkpoint has the name of its file."""

_TOTALS = ("epoch", "batch", "sample", "token")
_WITHIN = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_CLOCKS = ("total_wct", "epoch_wct", "batch_wct")
TIME_VARIABLES = (*_TOTALS, *_WITHIN, *_CLOCKS)
"""What a file name may contain besides."""

_DATA_FILE = re.compile(rf"(?:.*/)?[^/]+_([0-9a-f]{{16}})(?:{re.escape(SUFFIX)}|\.safetensors)")
"""Path of a data file of a directory; its group is the id of the save."""
_RANK = re.compile(r"[-_.]?(?:rank)?\{(?:rank|local_rank|node_rank)(?:![^}]*|:[^}]*)?\}")


class TimestampLike(Protocol):
    """A timestamp, as far as a name needs it."""

    def state_dict(self) -> dict[str, Any]: ...


class NamedState(Protocol):
    """A training state, or the record of a checkpoint, as far as a name needs it."""

    @property
    def run_name(self) -> str: ...

    @property
    def timestamp(self) -> TimestampLike | Mapping[str, Any]: ...


def variables_in(template: str, source: str) -> list[str]:
    """The format variables of ``template``; ``source`` names it in the error of one that cannot be read."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as e:
        raise ConfigError(f"{source} cannot be read: {e}. Variables are written {{epoch}}; a brace is {{{{.") from e


def check_variables(template: str, *, argument: str, allow_time: bool = True) -> str:
    """``template`` if it can be formatted.

    Raises:
        ConfigError: a variable or its format does not exist. ``argument`` is named in the message.
    """
    source = f"{argument}={template!r}"
    known = (*DIST_VARIABLES, *(TIME_VARIABLES if allow_time else ()))
    for name in variables_in(template, source):
        if name not in known:
            raise ConfigError(f"{source}: {{{name}}} is not a variable.{did_you_mean(name, known)}")
    try:
        template.format(**{name: "run" if name == "run_name" else 1.5 if name in _CLOCKS else 1 for name in known})
    except (ValueError, LookupError) as e:
        raise ConfigError(
            f"{source} cannot be formatted: {e}. Formats are those of python, as in {{epoch:04d}}."
        ) from e
    return template


def check_template(template: str, *, argument: str) -> str:
    """``template`` if it can be formatted, and names a file below its folder.

    Raises:
        ConfigError: a variable or its format does not exist, the name leaves its folder, the suffix asks for a format
            of checkpoints that does not exist, or what compresses it is not installed. ``argument`` is named in the
            message.
    """
    check_variables(template, argument=argument)
    source = f"{argument}={template!r}"
    path = Path(template)
    if not path.name or template.endswith("/") or path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{source}: expected the name of a file below the folder of checkpoints, without '..'.")
    try:
        format_of(template).check()
    except ConfigError as e:
        raise ConfigError(f"{source}: {e}") from e
    return template


def directory_template(template: str, *, argument: str = "save_filename") -> str:
    """The name of a directory that every rank writes a part of, where ``template`` is that of a file.

    The ending ``.pt`` is left out, and what tells ranks apart: ``'ep{epoch}-rank{rank}.pt'`` is ``'ep{epoch}'``.

    Raises:
        ConfigError: the name is that of an archive or a compressed file, or nothing is left of it.
    """
    suffix = format_of(template).suffix
    if suffix not in ("", ".pt"):
        raise ConfigError(
            f"{argument}={template!r}: sharded checkpoints are directories, which are not packed as {suffix!r}. Leave "
            "the ending out, or save one file: state_dict_type='full'."
        )
    folder, _, name = template.removesuffix(suffix).rpartition("/")
    name = _RANK.sub("", name)
    if not name:
        raise ConfigError(f"{argument}={template!r}: expected a name for the directory of a sharded checkpoint.")
    return f"{folder}/{name}" if folder else name


def archive_template(template: str, *, argument: str = "save_filename") -> str:
    """The name of the archives that DeepSpeed's ranks write, one each, where ``template`` is that of a file.

    ``.tar`` comes in the place of ``.pt``, or is added: ``'ep{epoch}-rank{rank}.pt'`` is
    ``'ep{epoch}-rank{rank}.tar'``.

    Raises:
        ConfigError: the name is the same for all ranks, or that of a compressed file that is no archive.
    """
    layout = format_of(template)
    if not layout.archive:
        if layout.suffix not in ("", ".pt"):
            raise ConfigError(
                f"{argument}={template!r}: DeepSpeed needs archives, and {layout.suffix!r} is none. Give "
                f"{template.removesuffix(layout.suffix) + '.tar.gz'!r}, for example, or leave the ending out."
            )
        template = template.removesuffix(layout.suffix) + ".tar"
    if "rank" not in variables_in(template, f"{argument}={template!r}"):
        raise ConfigError(
            f"{argument}={template!r}: each rank of DeepSpeed writes a file of its own; all would have this name. "
            "Put '{rank}' into it, as in 'ep{epoch}-ba{batch}-rank{rank}.tar'."
        )
    return template


def _dist_values(run_name: str) -> dict[str, Any]:
    from composerlite import dist  # imports torch, which a listing does without

    return {
        "run_name": run_name,
        "rank": dist.get_global_rank(),
        "local_rank": dist.get_local_rank(),
        "world_size": dist.get_world_size(),
        "local_world_size": dist.get_local_world_size(),
        "node_rank": dist.get_node_rank(),
    }


def format_name_with_dist(template: str, run_name: str, **extra: object) -> str:
    """``template`` with ``{run_name}``, ``{rank}``, … filled in.

    Args:
        template: a name with format variables.
        run_name: value of ``{run_name}``.
        **extra: values of further variables.

    Returns:
        The name.

    Raises:
        ConfigError: a variable does not exist.
    """
    return _fill(template, {**_dist_values(run_name), **extra})


def format_name_with_dist_and_time(
    template: str, run_name: str, timestamp: TimestampLike | Mapping[str, Any], **extra: object
) -> str:
    """``template`` with the variables of ranks and of time filled in; wall-clock times are seconds.

    Args:
        template: a name with format variables.
        run_name: value of ``{run_name}``.
        timestamp: gives ``{epoch}``, ``{batch}`` and the like; or its state dict.
        **extra: values of further variables.

    Returns:
        The name.

    Raises:
        ConfigError: a variable does not exist.
    """
    fields = timestamp if isinstance(timestamp, Mapping) else timestamp.state_dict()
    times = {name: _seconds(fields[name]) if name in _CLOCKS else int(fields[name]) for name in TIME_VARIABLES}
    return _fill(template, {**_dist_values(run_name), **times, **extra})


def root_and_template(remote: str, local: str) -> tuple[str, str]:
    """Cut the template ``remote`` of names in a bucket: what all begin with, without variables of time, and the rest.

    It is cut as in the folder if it ends with ``local``, the template there. Otherwise the root is the folders at its
    beginning whose names do not change with time.
    """
    if remote == local or remote.endswith(f"/{local}"):
        return remote.removesuffix(local).rstrip("/"), local
    parts = remote.split("/")
    fixed = 0
    while fixed < len(parts) - 1 and set(variables_in(parts[fixed], remote)) <= set(DIST_VARIABLES):
        fixed += 1
    return "/".join(parts[:fixed]), "/".join(parts[fixed:])


def _seconds(clock: timedelta | float) -> float:
    return clock.total_seconds() if isinstance(clock, timedelta) else float(clock)


def _fill(template: str, values: Mapping[str, Any]) -> str:
    for name in variables_in(template, f"name {template!r}"):
        if name not in values:
            raise ConfigError(f"name {template!r}: {{{name}}} is not a variable.{did_you_mean(name, values)}")
    return template.format(**values)


@final
class PartialFilePath:
    """A file name template and, possibly, the folder it is in.

    Args:
        filename: template of the file's name.
        folder: its folder; ``None``: to be given later.
    """

    def __init__(self, filename: str | Path, folder: str | Path | None = None) -> None:
        self.filename = str(filename)
        self.folder = None if folder is None else str(folder)

    @property
    def varies(self) -> bool:
        """Return true if the name changes as training advances."""
        return any(name in TIME_VARIABLES for _, name, _, _ in string.Formatter().parse(self.filename))

    def format(self, state: NamedState) -> str:
        """The path for ``state`` as it stands."""
        template = self.filename if self.folder is None else str(Path(self.folder) / self.filename)
        return format_name_with_dist_and_time(template, state.run_name, state.timestamp)

    def __repr__(self) -> str:
        return f"PartialFilePath({self.filename!r}, folder={self.folder!r})"


def get_save_filename(state: NamedState, filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}") -> str:
    """The name that a checkpoint of ``state`` gets now from the template ``filename``.

    Args:
        state: of the run.
        filename: a template, or a :class:`PartialFilePath`.

    Returns:
        The name.

    Raises:
        ConfigError: a variable does not exist.
    """
    return PartialFilePath(filename).format(state)


def name_pattern(template: str, run_name: str) -> re.Pattern[str]:
    """Matches every name that ``template`` can give in this run; the numbers are groups."""
    pattern, formats = "", dict[str, str | None]()
    for text, name, number_format, _ in string.Formatter().parse(template):
        pattern += re.escape(text)
        if name is None:
            continue
        number = r"\d+(?:\.\d+)?(?:e[-+]\d+)?" if name in _CLOCKS else r"\d+"
        if name == "run_name":
            pattern += re.escape(run_name)
        elif name not in formats:
            pattern += f"(?P<{name}>{number})"
            formats[name] = number_format
        else:
            pattern += f"(?P={name})" if formats[name] == number_format else f"(?:{number})"
    return re.compile(pattern)


def ensure_no_conflict(
    names: Iterable[str],
    template: str,
    *,
    run_name: str,
    timestamp: TimestampLike,
    folder: str,
    may_replace: Callable[[str], bool] = lambda _: False,
) -> None:
    """Refuse to start where a checkpoint is that this run would write later.

    Args:
        names: paths below ``folder`` of the files there are.
        template: names that the run will give.
        may_replace: checks that the run may replace the checkpoint of a name, although it is ahead.

    Raises:
        CheckpointExistsError: a file is ahead of ``timestamp``.
    """
    pattern = name_pattern(template, run_name)
    now = timestamp.state_dict()
    # What is compared is read from names on both sides: a clock that is rounded in one is rounded in the other.
    own = pattern.fullmatch(format_name_with_dist_and_time(template, run_name, timestamp))
    for name in names:
        match = pattern.fullmatch(name)
        if own is None or match is None or not _is_ahead(match.groupdict(), own.groupdict()):
            continue
        if not may_replace(name):
            raise CheckpointExistsError(
                f"save_folder={folder!r} already holds {name!r}, which this run (now at epoch {now['epoch']}, batch "
                f"{now['batch']}) would overwrite later. Resume from it with load_path or autoresume=True, choose "
                "another save_folder, delete it, or pass save_overwrite=True."
            )


def _is_ahead(found: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Check that a name with the numbers ``found`` comes later in a run than the one with ``own``."""
    progress = [(int(found[name]), int(own[name])) for name in _TOTALS if name in found]
    if "total_wct" in found and all(theirs == ours for theirs, ours in progress):
        progress = [(float(found["total_wct"]), float(own["total_wct"]))]
    if any(theirs != ours for theirs, ours in progress):
        return any(theirs > ours for theirs, ours in progress)
    # Counts within an epoch start anew in the next: they say something only where nothing else tells names apart.
    return any(int(found[name]) > int(own[name]) for name in _WITHIN if name in found)


def data_file_id(path: str) -> str | None:
    """Return the id of the save that wrote the data file ``path`` of a directory; ``None`` if it is no such file."""
    match = _DATA_FILE.fullmatch(path)
    return None if match is None else match[1]
