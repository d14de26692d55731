"""Checkpoints of runs that DeepSpeed trains: an archive for each rank, read in place, without extraction.

Each archive holds ``composer_states.pt``, with the same content in all archives, and the rank's files of DeepSpeed,
unchanged, below ``deepspeed/``. Extracted to one folder, all archives are a checkpoint for DeepSpeed's tools.

:class:`TorchFile` loads the pickles and allows known types only. Pickles may hold a few classes of DeepSpeed: the
reader makes placeholders, or objects of DeepSpeed's own classes if DeepSpeed is installed.

In a load each rank reads the rank's own archive. All ranks get ``composer_states.pt`` and the model states from the
archive of rank 0. If another number of ranks saved the checkpoint, DeepSpeed converts the files. For weights alone,
rank 0 merges and sends the weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.contents import DeepSpeedEngine, RestorePlan, half_loaded
from composerlite.checkpoint.foreign.deepspeed import by_rank, merged_contents, parts_for_weights, rank_count
from composerlite.checkpoint.format.archive import DEEPSPEED, STATES, is_tar_header, members_of, stand_ins
from composerlite.checkpoint.format.byte_sources import Window
from composerlite.checkpoint.format.packing import HEADER_BYTES, unpacked
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.format.weight_files import MODEL_STATES
from composerlite.checkpoint.load.reader import (
    RawFile,
    check_exists,
    opened,
    read_states,
    readable,
    shared_file,
    validate,
)
from composerlite.checkpoint.load.resolve import deepspeed_save, fetched, find_checkpoint, place_of
from composerlite.checkpoint.place.catalog import Catalog, home_of
from composerlite.checkpoint.record.naming import FIRST_RANK, format_name_with_dist, variables_in
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.save.plain_file import write_safetensors, write_torch
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.storage import FileDigest, ObjectStore, is_uri, parse_uri
from composerlite.types import StateDict

log = logging.getLogger(__name__)

_FILE = re.compile(rf"{DEEPSPEED}/([A-Za-z0-9_-][A-Za-z0-9_.-]*\.pt)")


@final
class RankFiles(NamedTuple):
    """The files in the archive of a rank.

    Attributes:
        path: path of the archive, for messages.
        files: DeepSpeed's files, and ``composer_states.pt``, by name.
    """

    path: Path
    files: Mapping[str, RawFile]

    @property
    def names(self) -> list[str]:
        """Names of DeepSpeed's files."""
        return sorted(set(self.files) - {STATES})

    @property
    def model_states(self) -> str:
        """Name of the file with the model states of the first rank.

        Raises:
            CorruptCheckpointError: there is no such file.
            IncompatibleCheckpointError: layers or experts are split over ranks.
        """
        return by_rank(self.names, MODEL_STATES, f"checkpoint {str(self.path)!r}").get(0, "model states")

    def raw(self, name: str) -> RawFile:
        """Return one of DeepSpeed's files, or ``composer_states.pt``.

        Raises:
            CorruptCheckpointError: there is no such file.
        """
        if name not in self.files:
            raise CorruptCheckpointError(f"it has no {name!r} in it")
        return self.files[name]

    def contents(
        self,
        name: str,
        types: Mapping[str, type] | None = None,
        *,
        trust: bool = False,
        prune: Callable[[StateDict], StateDict] | None = None,
    ) -> StateDict:
        """Read one of DeepSpeed's files, or ``composer_states.pt``.

        Args:
            name: name of the file.
            types: allowed classes; ``None``: placeholders for the classes of DeepSpeed.
            trust: load any type, **running any code in the file**.
            prune: selects the parts of the contents to read.

        Raises:
            CorruptCheckpointError, RefusedError: as :class:`TorchFile`.
        """
        raw, types = self.raw(name), stand_ins() if types is None else types
        try:
            file = TorchFile(raw.source, raw.source.size_bytes, trust=trust, check_sums=raw.check_sums, types=types)
            return read_states(file, prune)
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"its {name!r}: {e}") from e


@contextlib.contextmanager
def opened_archive(
    path: Path, digest: FileDigest | None = None, *, unpacked_bytes: int | None = None
) -> Generator[RankFiles]:
    """Open the archive ``path``, compressed or not.

    Args:
        path: path of the archive.
        digest: digest of the archive in the record; ``None``: the checksums in the files verify the files.
        unpacked_bytes: size of the checkpoint's largest archive before compression; ``None``: unknown.

    Raises:
        CorruptCheckpointError: the bytes differ from the saved bytes, or the archive holds links or devices.
        IncompatibleCheckpointError: the file is no archive of DeepSpeed.
        OSError: the file is missing or cannot be read, or there is no space to decompress the file.
    """
    with unpacked(path, digest, keep_archive=True, size_bytes=unpacked_bytes) as source:
        found: dict[str, Window] = {}
        if is_tar_header(source.read(0, min(HEADER_BYTES, source.size_bytes))):
            found = members_of(source, source.size_bytes)
        raw = {name: RawFile(member, digest is None) for name, member in found.items()}
        files = {match[1]: raw[name] for name in raw if (match := _FILE.fullmatch(name)) is not None}
        if not files:
            lack = f"it has no {DEEPSPEED!r} in it" if found else "it is not an archive"
            raise IncompatibleCheckpointError(f"checkpoint {str(path)!r} was saved without DeepSpeed: {lack}.")
        files |= {STATES: raw[STATES]} if STATES in raw else {}
        yield RankFiles(path, files)


@final
class Archives(NamedTuple):
    """The archives of a checkpoint.

    Attributes:
        names: names of the archives, in the order of the ranks: paths, URIs, or names in ``object_store``.
        manifest: the record; ``None``: the archives have none.
    """

    names: Sequence[str]
    manifest: Manifest | None

    @contextlib.contextmanager
    def opened(self, rank: int, object_store: ObjectStore | None) -> Generator[RankFiles]:
        """Open the archive of ``rank``. An archive in a store is downloaded for the duration of the block.

        Raises:
            CheckpointNotFoundError: the archive is missing. The message names the archive.
            CheckpointError: as :func:`opened_archive`.
        """
        with fetched(self.names[rank], object_store) as path:
            if not path.is_file():
                raise CheckpointNotFoundError(
                    f"checkpoint {self.names[0]!r}: {self.names[rank]!r}, the file of rank {rank}, is missing."
                )
            validate(path)
            digest = None if self.manifest is None else self.manifest.files[rank].digest
            most = None if self.manifest is None else self.manifest.unpacked_bytes or None
            with readable(path), opened_archive(path, digest, unpacked_bytes=most) as archive:
                yield archive

    @contextlib.contextmanager
    def all_opened(self, object_store: ObjectStore | None) -> Generator[list[RankFiles]]:
        """Open the archives of all ranks. Raises as :meth:`opened`."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self.opened(rank, object_store)) for rank in range(len(self.names))]


def find_archives(template: str, run_name: str, object_store: ObjectStore | None, *, argument: str) -> Archives:
    """Find the archives of all ranks.

    Args:
        template: the name of the archive of rank 0, or of all archives with ``{rank}`` in the name.
        run_name: for ``{run_name}`` in ``template``.
        object_store: the store with the archives; ``None``: ``template`` is a path or a URI.
        argument: name of the user's argument, for messages.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        IncompatibleCheckpointError: the checkpoint was saved without DeepSpeed.
        ConfigError: ``template`` names a file without a record, so the names of the other ranks are unknown.
    """
    first = format_name_with_dist(template, run_name, **FIRST_RANK)
    with place_of(first, object_store) as (place, last):
        if last and not place.exists(last) and deepspeed_save(place, last) is not None:
            raise IncompatibleCheckpointError(
                f"{argument}={template!r} is a folder of DeepSpeed's engine. deepspeed_config needs archives. "
                "Its weights load with load_weights_only=True; a run without deepspeed_config loads all of the folder; "
                "'composerlite checkpoint convert' writes its weights to a file."
            )
        if (path := place.path_of(last)) is not None:
            check_exists(path)
        home, name = home_of(place, last)
        manifest = Catalog(home).manifest_of(name)
        if manifest is not None:
            if manifest.kind != "deepspeed":
                raise IncompatibleCheckpointError(f"checkpoint {first!r} was saved without DeepSpeed.")
            full_name = home.uri if object_store is None else home.name_of
            return Archives([full_name(file.path) for file in manifest.files], manifest)
    if "rank" not in variables_in(template, f"{argument}={template!r}"):
        raise ConfigError(
            f"{argument}={template!r}: each rank of DeepSpeed has its own file, and this name is the same for all "
            f"ranks. Put '{{rank}}' into it, as in 'ep1-rank{{rank}}.tar'."
        )
    with Archives([first], None).opened(0, object_store) as archive:
        number = "dp_world_size"
        states = archive.contents(archive.model_states, prune=lambda states: {number: states.get(number)})
        ranks = rank_count(states, f"checkpoint {first!r}")
    log.warning("checkpoint %s has no record: loading it unverified", first)
    return Archives([format_name_with_dist(template, run_name, rank=rank) for rank in range(ranks)], None)


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def weights_in(archives: Sequence[RankFiles]) -> dict[str, Tensor]:
    """Return the state dict of the model in the archives of all ranks, parameters in fp32.

    Raises:
        CorruptCheckpointError: a file is missing, or the files do not fit together.
        IncompatibleCheckpointError: the model has experts, or layers that are split over ranks.
    """
    archive_of = {name: archive for archive in archives for name in archive.names}

    def read(name: str) -> StateDict:
        return archive_of[name].contents(name, prune=parts_for_weights)

    return merged_contents(archive_of, read, f"checkpoint {str(archives[0].path)!r}", weights_only=True)["module"]


def unshard_zero(
    path: str | os.PathLike[str], target: str | os.PathLike[str], *, save_overwrite: bool = False, quiet: bool = False
) -> Path:
    """Merge the weights in the archives of DeepSpeed's ranks into one file: the model's state dict, parameters in fp32.

    DeepSpeed need not be installed. All weights are in memory at once, twice for a moment.

    Args:
        path: path or URI of the archive of rank 0, or of a link to that archive. Archives without a record, such as
            Composer's, need ``{rank}`` in the name.
        target: the file. The suffix ``.safetensors`` means safetensors, any other suffix torch.
        save_overwrite: replace a file of that name.
        quiet: do not log the name of the file.

    Returns:
        The file.

    Raises:
        CheckpointExistsError: a FileExistsError: ``target`` exists, and ``save_overwrite`` is false.
        ConfigError: ``target`` is a URI; or ``path`` has neither a record nor ``{rank}``, so the names of the other
            archives are unknown.
        RuntimeError: there are several ranks.
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError, UntrustedCheckpointError: as
            :func:`load_checkpoint`.
    """
    if dist.get_world_size() > 1:
        raise RuntimeError("unshard_zero works in one process: call it where there are no other ranks.")
    if is_uri(os.fspath(target)):
        raise ConfigError(f"target={os.fspath(target)!r}: expected a local file. Upload the result afterwards.")
    file = Path(parse_uri(os.fspath(target))[2])
    write = write_safetensors if file.suffix == ".safetensors" else write_torch
    if file.exists() and not save_overwrite:
        raise CheckpointExistsError(f"{str(file)!r} exists: give another name, or save_overwrite=True.")
    archives = find_archives(os.fspath(path), "", None, argument="path")
    with archives.all_opened(None) as every, readable(Path(archives.names[0])):
        weights = weights_in(every)
    write(file, weights)
    if not quiet:
        log.info("wrote %s", file)
    return file


# ── loading into a run ───────────────────────────────────────────────────────────────────────────────────────────────
def load_archives(
    engine: DeepSpeedEngine, template: str, plan: RestorePlan, object_store: ObjectStore | None, *, trust: bool
) -> list[dict[str, Any]] | None:
    """Restore a state that DeepSpeed trains, on every rank, and return the states of the random generators, if any.

    If ``plan`` restores only weights, any number of ranks may have saved the checkpoint, with or without DeepSpeed.

    Args:
        engine: the engine of DeepSpeed that trains the state.
        template: the name of the archive of rank 0, or of all archives with ``{rank}`` in the name.
        plan: parts of the state to restore.
        object_store: the store with the archives; ``None``: ``template`` is a path or a URI.
        trust: load any type, **running any code in the files**.

    Raises:
        ConfigError: ``load_ignore_keys`` excludes a part of DeepSpeed's files.
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    ignored = () if plan.ignore_keys is None or callable(plan.ignore_keys) else plan.ignore_keys
    for glob in ignored:
        if glob.startswith(("state/model", "state/optimizers")):
            raise ConfigError(
                f"load_ignore_keys: {glob!r} is in the files of DeepSpeed, which loads weights and optimizer as a "
                "whole. Leave it out, or load the weights alone: load_weights_only=True."
            )
    with contextlib.ExitStack() as stack:
        load = _Load(engine, template, plan, object_store, trust, stack)
        if plan.weights_only:
            load.set_weights(load.read_weights, strict=plan.strict)
            log.debug("loaded the weights of %s", plan.source)
            return None
        archives = load.group.from_first("looking for the checkpoint", load.find)
        is_own = len(archives.names) == load.group.size
        plan.contents = load.from_own_archive(archives) if is_own else load.from_other_ranks(archives)
        return plan.restore()


@final
@dataclass(frozen=True)
class _Load:
    """One call of :func:`load_archives`, with the arguments as fields. ``stack`` closes the open archives at the end.

    Methods are collective, except :meth:`find` and :meth:`read_weights`, called on rank 0 alone.
    """

    engine: DeepSpeedEngine
    template: str
    plan: RestorePlan
    object_store: ObjectStore | None
    trust: bool
    stack: contextlib.ExitStack
    group: dist.Group = field(default_factory=dist.get_group)

    def find(self) -> Archives:
        """Find the archives of all ranks. On rank 0."""
        return find_archives(self.template, self.plan.state.run_name, self.object_store, argument="load_path")

    def from_own_archive(self, archives: Archives) -> StateDict:
        """Load model and optimizer from this rank's archive, and return the rest of the state to restore."""
        with self.group.all_or_none(f"opening {self.plan.source}"):
            own = self.stack.enter_context(archives.opened(self.group.rank, self.object_store))
        wanted = self._states(own)
        shared = self.group.broadcast([name for name in own.names if name.startswith("mp_rank_")])
        # Only the archive of rank 0 has the files ``mp_rank_*``.
        files = {name: self._of_first(own, name) for name in shared if self.group.size > 1}
        with self.group.all_or_none(f"reading {self.plan.source}"), readable(own.path):
            for name in own.names:
                if name not in files:
                    files[name] = own.contents(name, self.engine.types, trust=self.trust)
        with self.group.all_or_none("restoring the run"), half_loaded(True):
            self.engine.load(files, source=self.plan.source)
        return wanted

    def from_other_ranks(self, archives: Archives) -> StateDict:
        """Load model and optimizer that another number of ranks saved, and return the rest of the state to restore.

        The first rank of each node converts the files for all ranks of the node.
        """
        is_first = dist.get_local_rank() == 0
        every: list[RankFiles] = []
        with self.group.all_or_none(f"opening {self.plan.source}"):
            if is_first:
                every = self.stack.enter_context(archives.all_opened(self.object_store))
        first = every[0] if every else None
        wanted = self._states(first)
        name = self.group.from_first("looking for the model states", lambda: every[0].model_states)
        model = {name: self._of_first(first, name)}
        with self.group.all_or_none("checking that the checkpoint fits the run"):
            self.engine.check_fits(model[name], source=self.plan.source)
        log.info(
            "%s was saved by %d ranks: converting it for %d", self.plan.source, len(archives.names), self.group.size
        )
        folder: str | None = None
        with self.group.all_or_none(f"converting {self.plan.source}"):
            if is_first:
                folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-"))
                for archive in every:  # DeepSpeed runs any code in a file, so save the checked contents again
                    with readable(archive.path):
                        for file in archive.names:
                            torch.save(archive.contents(file, self.engine.types, trust=self.trust), Path(folder, file))
                self.engine.convert(Path(folder), source=self.plan.source)
        folders = self.group.gather((dist.get_node_rank(), folder))
        mine = next(path for node, path in folders if node == dist.get_node_rank() and path is not None)
        with self.group.all_or_none("restoring the run"), half_loaded(True):
            self.engine.load_converted(Path(mine), model, source=self.plan.source)
        self.set_weights(lambda: weights_in(every), strict=False)  # also buffers and frozen parameters
        return wanted

    def set_weights(self, read: Callable[[], dict[str, Tensor]], *, strict: bool) -> None:
        """Call ``read`` on rank 0, and load the returned weights into the model on every rank."""
        weights: dict[str, Tensor] | None = None
        with self.group.all_or_none(f"reading {self.plan.source}"):
            if self.group.is_first:
                weights = read()
        self.engine.load_weights(weights, strict=strict, source=self.plan.source)

    def read_weights(self) -> dict[str, Tensor]:
        """Read the state dict of the model. On rank 0."""
        first = format_name_with_dist(self.template, self.plan.state.run_name, **FIRST_RANK)
        found = find_checkpoint(self.stack, first, self.object_store, progress_bar=False, trust=self.trust)
        if found.kind != "file" or found.path is None:
            raise IncompatibleCheckpointError(
                f"checkpoint {first!r} is not a file of a run. 'composerlite checkpoint convert' makes a file of "
                "it, which a run with deepspeed_config loads."
            )
        is_of_deepspeed = False
        with contextlib.suppress(IncompatibleCheckpointError), opened_archive(found.path):
            is_of_deepspeed = True
        if is_of_deepspeed:
            with self.find().all_opened(self.object_store) as every, readable(Path(first)):
                return weights_in(every)
        with opened(found.path, trust=self.trust) as file:
            state = self.plan.in_our_form(file.contents)["state"]
            file.contents = {"model": state.get("model", {})}
            file.read()
            return file.contents["model"]

    def _of_first(self, archive: RankFiles | None, name: str) -> StateDict:
        """Return, on every rank, the contents of the file ``name`` in the ``archive`` of rank 0."""
        raw: RawFile | None = None
        with self.group.all_or_none(f"reading {self.plan.source}"):
            if self.group.is_first:
                assert archive is not None
                raw = archive.raw(name)
        file = shared_file(raw, f"{name} of {self.plan.source}", trust=self.trust)
        file.read()
        return file.contents

    def _states(self, archive: RankFiles | None) -> StateDict:
        """Return, on every rank, the parts to restore of ``composer_states.pt`` in the ``archive`` of rank 0."""
        contents = self._of_first(archive, STATES)
        with self.group.all_or_none("checking that the checkpoint fits the run"):
            wanted, _ = self.plan.matched(contents)
        return wanted
