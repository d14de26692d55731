"""Names of checkpoints, and templates of names, such as ``ep{epoch}-rank{rank}.pt``.

Only this module formats or parses names.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, SupportsInt, final

from composerlite.checkpoint.format import SUFFIX
from composerlite.checkpoint.format.packing import format_of
from composerlite.errors import ConfigError, did_you_mean

DIST_VARIABLES = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
"""Variables that templates of folder names and file names may have."""
FIRST_RANK: Mapping[str, int] = {"rank": 0, "local_rank": 0, "node_rank": 0}
"""Values on rank 0 of the variables that differ between ranks. The checkpoint has the name of rank 0's file."""
_TOTALS = ("epoch", "batch", "sample", "token")
_WITHIN = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_CLOCKS = ("total_wct", "epoch_wct", "batch_wct")
TIME_VARIABLES = (*_TOTALS, *_WITHIN, *_CLOCKS)
"""Further variables that templates of file names may have. The last three, the clocks, are in seconds."""
_DATA_FILE = re.compile(rf"(?:.*/)?[^/]+_([0-9a-f]{{16}})(?:{re.escape(SUFFIX)}|\.safetensors)")
"""Path of a data file of a directory; the group is the id of the save."""
_RANK = re.compile(r"[-_.]?(?:rank)?\{(?:rank|local_rank|node_rank)(?:![^}]*|:[^}]*)?\}")


class TimestampLike(Protocol):
    """Interface of the timestamp of a training state, for names."""

    @property
    def batch(self) -> SupportsInt: ...

    def state_dict(self) -> dict[str, Any]: ...


class NamedState(Protocol):
    """Interface of a training state, or of the record of a checkpoint, for names."""

    @property
    def run_name(self) -> str: ...

    @property
    def timestamp(self) -> TimestampLike | Mapping[str, Any]: ...


# ── checks of a user's templates ─────────────────────────────────────────────────────────────────────────────────────
def variables_in(template: str, source: str) -> list[str]:
    """Return the format variables of ``template``.

    Raises:
        ConfigError: the braces of ``template`` do not match; the message begins with ``source``.
    """
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as e:
        raise ConfigError(f"{source} cannot be read: {e}. Variables are written {{epoch}}; a brace is {{{{.") from e


def check_variables(template: str, *, argument: str, allow_time: bool = True) -> str:
    """Return ``template`` if its variables exist and their formats work.

    Args:
        template: a name with format variables.
        argument: name of the user's argument, for messages.
        allow_time: allow variables of time.

    Raises:
        ConfigError: a variable does not exist, a format is wrong, or the braces do not match.
    """
    source = f"{argument}={template!r}"
    known = (*DIST_VARIABLES, *(TIME_VARIABLES if allow_time else ()))
    _check_known(template, known, source)
    try:
        template.format(**{name: "run" if name == "run_name" else 1.5 if name in _CLOCKS else 1 for name in known})
    except (ValueError, LookupError) as e:
        raise ConfigError(
            f"{source} cannot be formatted: {e}. Use Python's format syntax, such as {{epoch:04d}}."
        ) from e
    return template


def _check_known(template: str, known: Iterable[str], source: str) -> None:
    for name in variables_in(template, source):
        if name not in known:
            raise ConfigError(f"{source}: {{{name}}} is not a variable.{did_you_mean(name, known)}")


def check_template(template: str, *, argument: str) -> str:
    """Return ``template`` if it names a file below the folder of checkpoints, with a known format.

    Raises:
        ConfigError: a variable or its format does not exist, the name leaves the folder, the suffix names no format of
            checkpoints, or a library for the compression is not installed. The message names ``argument``.
    """
    check_variables(template, argument=argument)
    source = f"{argument}={template!r}"
    try:
        format_of(relative_path(template))
    except ValueError as e:
        raise ConfigError(f"{source}: {e}") from e
    return template


def directory_template(template: str, *, argument: str = "save_filename") -> str:
    """Return the name template of a sharded checkpoint's directory, made from the file template ``template``.

    The ending ``.pt`` and, in the last part of the path, the variables that differ between ranks are removed:
    ``'ep{epoch}-rank{rank}.pt'`` gives ``'ep{epoch}'``.

    Raises:
        ConfigError: the name belongs to an archive or a compressed file, or the result is empty.
    """
    suffix = format_of(template).suffix
    if suffix not in ("", ".pt"):
        raise ConfigError(
            f"{argument}={template!r}: sharded checkpoints are directories and cannot be packed as {suffix!r}. "
            "Leave the ending out, or save one file: state_dict_type='full'."
        )
    folder, _, name = template.removesuffix(suffix).rpartition("/")
    name = _RANK.sub("", name)
    if not name:
        raise ConfigError(f"{argument}={template!r}: expected a name for the directory of a sharded checkpoint.")
    return f"{folder}/{name}" if folder else name


def archive_template(template: str, *, argument: str = "save_filename") -> str:
    """Return the name template of the archives of DeepSpeed's ranks, made from the file template ``template``.

    The suffix of an archive stays. Otherwise ``.tar`` replaces ``.pt``, or is added: ``'ep{epoch}-rank{rank}.pt'``
    gives ``'ep{epoch}-rank{rank}.tar'``.

    Raises:
        ConfigError: the template has no ``{rank}``, so all ranks would have the same name; or the file is compressed
            and no archive.
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
            f"{argument}={template!r}: each rank of DeepSpeed writes its own file, but all would have this name. "
            f"Put '{{rank}}' into it, as in 'ep{{epoch}}-ba{{batch}}-rank{{rank}}.tar'."
        )
    return template


def root_and_template(remote: str, local: str) -> tuple[str, str]:
    """Split the template ``remote`` of names in a bucket into a root folder and the rest.

    If ``remote`` ends with ``local``, the template in the local folder, the rest is ``local``. Otherwise the root has
    all leading folders without variables of time.
    """
    if remote == local or remote.endswith(f"/{local}"):
        return remote.removesuffix(local).rstrip("/"), local
    parts = remote.split("/")
    fixed = 0
    while fixed < len(parts) - 1 and set(variables_in(parts[fixed], remote)) <= set(DIST_VARIABLES):
        fixed += 1
    return "/".join(parts[:fixed]), "/".join(parts[fixed:])


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def format_name_with_dist(template: str, run_name: str, **extra: object) -> str:
    """Return ``template`` with ``{run_name}``, ``{rank}`` and the other variables of ranks filled in.

    Args:
        template: a name with format variables.
        run_name: value of ``{run_name}``.
        **extra: values of further variables.

    Returns:
        The name.

    Raises:
        ConfigError: a variable does not exist.
    """
    from composerlite import dist  # imports torch, which a listing does not need

    values: dict[str, Any] = {
        "run_name": run_name,
        "rank": dist.get_global_rank(),
        "local_rank": dist.get_local_rank(),
        "world_size": dist.get_world_size(),
        "local_world_size": dist.get_local_world_size(),
        "node_rank": dist.get_node_rank(),
        **extra,
    }
    _check_known(template, values, f"name {template!r}")
    return template.format(**values)


def format_name_with_dist_and_time(
    template: str, run_name: str, timestamp: TimestampLike | Mapping[str, Any], **extra: object
) -> str:
    """Return ``template`` with the variables of ranks and of time filled in; clocks are in seconds.

    Args:
        template: a name with format variables.
        run_name: value of ``{run_name}``.
        timestamp: the timestamp with the values of the variables of time, or the state dict of the timestamp.
        **extra: values of further variables.

    Returns:
        The name.

    Raises:
        ConfigError: a variable does not exist.
    """
    fields = timestamp if isinstance(timestamp, Mapping) else timestamp.state_dict()
    times: dict[str, object] = {name: int(fields[name]) for name in (*_TOTALS, *_WITHIN)}
    for name in _CLOCKS:
        clock = fields[name]
        times[name] = clock.total_seconds() if isinstance(clock, timedelta) else float(clock)
    return format_name_with_dist(template, run_name, **{**times, **extra})


def names_of_ranks(template: str, state: NamedState, count: int = 1) -> list[str]:
    """Return the names of ``template`` on the first ``count`` ranks, in order, at the current time of ``state``."""
    from composerlite import dist  # imports torch, which a listing does not need

    per_node = dist.get_local_world_size()
    return [
        format_name_with_dist_and_time(
            template, state.run_name, state.timestamp, rank=rank, local_rank=rank % per_node, node_rank=rank // per_node
        )
        for rank in range(count)
    ]


def varies(template: str) -> bool:
    """Return true if the name changes during training."""
    return not set(variables_in(template, "file name")).isdisjoint(TIME_VARIABLES)


@final
class PartialFilePath:
    """A file name template and, possibly, its folder.

    Args:
        filename: template of the file name.
        folder: the folder; ``None``: given later.
    """

    def __init__(self, filename: str | Path, folder: str | Path | None = None) -> None:
        self.filename = str(filename)
        self.folder = None if folder is None else str(folder)

    def format(self, state: NamedState) -> str:
        """Return the path at the current time of ``state``."""
        template = self.filename if self.folder is None else str(Path(self.folder) / self.filename)
        return format_name_with_dist_and_time(template, state.run_name, state.timestamp)

    def __repr__(self) -> str:
        return f"PartialFilePath({self.filename!r}, folder={self.folder!r})"


def get_save_filename(state: NamedState, filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}") -> str:
    """Return the name of a checkpoint of ``state`` at the current time.

    Args:
        state: state of the run.
        filename: a template.

    Returns:
        The name.

    Raises:
        ConfigError: a variable does not exist.
    """
    return PartialFilePath(filename).format(state)


# ── names in a place ─────────────────────────────────────────────────────────────────────────────────────────────────
def name_pattern(template: str, run_name: str) -> re.Pattern[str]:
    """Return a pattern of all names of ``template`` in this run. Each number is a group with the variable's name."""
    pattern, known = "", set[str]()
    for text, name, _, _ in string.Formatter().parse(template):
        pattern += re.escape(text)
        if name == "run_name":
            pattern += re.escape(run_name)
        elif name is not None:
            number = r"\d+(?:\.\d+)?(?:e[-+]\d+)?" if name in _CLOCKS else r"\d+"
            pattern += f"(?:{number})" if name in known else f"(?P<{name}>{number})"
            known.add(name)
    return re.compile(pattern)


def names_ahead(names: Iterable[str], template: str, run_name: str, timestamp: TimestampLike) -> list[str]:
    """Select from ``names``, paths of existing files, the names that a run at ``timestamp`` would write later.

    Args:
        names: the paths.
        template: template of the run's names.
        run_name: name of the run.
        timestamp: current time of the run.

    Returns:
        The names of ``template`` with later numbers than the name at ``timestamp``.
    """
    pattern = name_pattern(template, run_name)
    # Compare numbers parsed from names on both sides: a clock in a name is rounded.
    own = pattern.fullmatch(format_name_with_dist_and_time(template, run_name, timestamp))
    if own is None:
        return []
    # Counts within an epoch start anew in the next epoch, so they decide only between names that are equal otherwise.
    numbers = [number for number in (*_TOTALS, "total_wct", *_WITHIN) if number in pattern.groupindex]
    now = [float(own[number]) for number in numbers]
    matches = [match for name in names if (match := pattern.fullmatch(name)) is not None]
    return [match.string for match in matches if [float(match[number]) for number in numbers] > now]


def data_file_id(path: str) -> str | None:
    """Return the id of the save that wrote the data file ``path`` of a directory; ``None`` for other files."""
    match = _DATA_FILE.fullmatch(path)
    return None if match is None else match[1]


# ── paths in records ─────────────────────────────────────────────────────────────────────────────────────────────────
_LONGEST_PATH, _LONGEST_PART = 4096, 255
_TEMPORARY_BYTES = len("..tmp-") + 16
"""Number of bytes by which a temporary name is longer than the final name."""


def relative_path(value: str) -> str:
    """Return ``value`` if it is the path of a file inside a folder, with slashes between the parts.

    Raises:
        ValueError: the value is no such path, or no file system takes it. The message states the rule.
    """
    parts = [part for part in value.split("/") if part not in ("", ".")]
    shown = repr(value if len(value) <= 80 else f"{value[:80]}…")
    try:
        lengths = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError as e:
        raise ValueError(f"{shown} is not a path: it has characters that a file name cannot have") from e
    is_inside = ".." not in value.replace("\\", "/").split("/") and not value.startswith(("/", "\\"))
    if not parts or not is_inside or not value.endswith(parts[-1]):
        rule = "expected the path of a file inside the folder, relative to it, without '..'"
    elif any(ord(character) < 32 or ord(character) == 127 for character in value):
        rule = "it has control characters"
    elif sum(lengths) + len(parts) > _LONGEST_PATH or max(lengths) > _LONGEST_PART:
        rule = f"file systems allow {_LONGEST_PART} bytes in a part and {_LONGEST_PATH} in total"
    else:
        return value
    raise ValueError(f"path {shown}: {rule}")


def new_name(value: str, *, on_disk: bool = True) -> str:
    """Return ``value`` if a new checkpoint, or a new file in a checkpoint, can have this name.

    Args:
        value: the name, relative to the folder or bucket of checkpoints.
        on_disk: the checkpoints are in a folder, where a file first has a longer, temporary name.

    Raises:
        ValueError: as :func:`relative_path`, or the name is too long for a temporary name.
    """
    name = relative_path(value)
    length, most = len(os.fsencode(name.rpartition("/")[2])), _LONGEST_PART - _TEMPORARY_BYTES
    if on_disk and length > most:
        raise ValueError(
            f"the name has {length} bytes, of at most {most}: file systems allow {_LONGEST_PART}, of which "
            f"temporary names need {_TEMPORARY_BYTES}"
        )
    return name
