"""Archives of ranks are one checkpoint, to which a planted record adds no files of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from parts import flip, save_archives, save_batch, tree
from storage.local_store import LocalObjectStore

from composerlite.checkpoint import Catalog, FileRecord, Manifest
from composerlite.checkpoint.deepspeed.archives import find_archives
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import home_of
from composerlite.checkpoint.place.commit import delete_checkpoint, fetch_checkpoint, quarantine_checkpoint
from composerlite.checkpoint.place.place import Folder
from composerlite.checkpoint.record.record import SavedRun, seal
from composerlite.checkpoint.tools.copying import copy
from composerlite.checkpoint.tools.surveying import Pointed, survey
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import FileDigest

BODY = b"1234"


def digest(data: bytes) -> FileDigest:
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def _checkpoint(folder: Path) -> Path:
    save_batch(folder, 7, template="ba{batch}.tar", latest=None)
    return folder / "ba7.tar"


def _no_record(folder: Path) -> Path:
    (folder / "ba7.tar").write_bytes(b"mine")
    return folder / "ba7.tar"


def _part(folder: Path) -> Path:
    save_archives(folder, 7, template="ba7-rank{rank}.tar")
    return folder / "ba7-rank1.tar"


VICTIMS: dict[str, Callable[[Path], Path]] = {"checkpoint": _checkpoint, "no record": _no_record, "part": _part}


def plant(folder: Path, victim: Path) -> Manifest:
    """Plant ``ba1.tar``, or ``ba1-rank1.tar``, which names ``victim`` as the archive of another rank, with its id."""
    manifests = Catalog(folder).manifests()
    name = victim.name.replace("7", "1")
    template = name.replace("1", "{rank}", 1)
    record = Manifest(
        name=name,
        kind="deepspeed",
        form="archives",
        template=template,
        run=SavedRun(name="run", timestamp={"batch": 1}, world_size=2),
        files=(FileRecord(victim.name, **dataclasses.asdict(digest(victim.read_bytes()))),),
    )
    if manifests:
        record = dataclasses.replace(record, id=manifests[0].id)
    (folder / name).write_bytes(BODY + seal(record, digest(BODY)))
    (planted,) = [one for one in Catalog(folder).manifests() if one.name == name]
    assert [file.path for file in planted.files] == [name, victim.name]
    return planted


@pytest.fixture(params=VICTIMS)
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file in the folder ``run`` that a planted record is going to name."""
    (tmp_path / "run").mkdir()
    return VICTIMS[request.param](tmp_path / "run")


def test_a_planted_checkpoint_goes_alone(victim: Path) -> None:
    """Retention and ``prune`` delete it, and nothing that is not its own."""
    before = tree(victim.parent)
    planted = plant(victim.parent, victim)
    delete_checkpoint(Catalog(victim.parent).place, planted)
    assert tree(victim.parent) == before


def test_a_planted_checkpoint_is_set_aside_alone(victim: Path) -> None:
    """A damaged one is renamed: the checkpoint that it names stays whole. A file without a record may be a part of it
    that lost the record: it is renamed, too."""
    has_record = bool(Catalog(victim.parent).manifests())
    before = tree(victim.parent)
    planted = plant(victim.parent, victim)
    quarantine_checkpoint(Folder(victim.parent), planted)
    (victim.parent / f"{planted.name}.damaged").unlink()
    if not has_record:
        victim.with_name(f"{victim.name}.damaged").rename(victim)
    assert tree(victim.parent) == before


def test_a_planted_checkpoint_is_not_copied_nor_fetched(victim: Path, tmp_path: Path) -> None:
    """It would replace what has the names of others in the target."""
    planted = plant(victim.parent, victim)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / victim.name).write_bytes(b"good")
    source, target = Folder(victim.parent), Folder(tmp_path / "there")
    (found,) = [one for one in survey(source) if one.name == planted.name]
    refused = pytest.raises(CorruptCheckpointError, match=rf"{victim.name}', which is no part of it")
    with refused:
        copy(found, target, overwrite=True)
    with Bucket.of(LocalObjectStore(tmp_path), "run") as bucket, refused:
        fetch_checkpoint(bucket, planted, target)
    assert tree(tmp_path / "there") == {victim.name: b"good"}


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("template", ["ba1-rank{rank}.tar", "rank{rank}/ba1.tar"])
def test_the_archive_of_the_first_rank_stands_for_all(
    template: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads, ``verify`` and ``cp`` that name it find the others, also where each rank has a folder."""
    save_archives(tmp_path / "run", 3, template=template)
    store = LocalObjectStore(tmp_path)
    names = [f"run/{template.format(rank=rank)}" for rank in (0, 1)]
    given = None if where == "folder" else store
    monkeypatch.chdir(tmp_path)
    for name in (names[0], f"run/{template}"):
        archives = find_archives(name, "run", given, argument="load_path")
        assert [str(Path(path).relative_to(tmp_path) if given is None else path) for path in archives.names] == names
    folder, _, last = names[0].rpartition("/")
    place = Folder(Path(folder)) if where == "folder" else Bucket.of(store, folder)
    with place:
        pointed = Pointed(*home_of(place, last), names[0])
        found = pointed.the_one(whole=True)
        assert (found.name, found.state, len(found.files)) == (template.format(rank=0), "committed", 2)
        with Folder(tmp_path / "there") as target:
            assert copy(found, target)
    assert tree(tmp_path / "there") == tree(tmp_path / "run")


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_archives_of_ranks_go_as_a_whole(where: str, tmp_path: Path) -> None:
    """Each says of which save it is. They are one checkpoint in a listing."""
    save_archives(tmp_path / "run", 3)
    catalog = Catalog(tmp_path / "run" if where == "folder" else Bucket.of(LocalObjectStore(tmp_path), "run"))
    with catalog.place as place:
        (found,) = survey(place)
        assert (found.name, found.state, len(found.files)) == ("c-rank0.tar", "committed", 2)
        (manifest,) = catalog.manifests()
        catalog.verify(manifest)
        delete_checkpoint(catalog.place, manifest)
        assert list(place.files()) == []


def test_archives_of_ranks_are_set_aside_as_a_whole(tmp_path: Path) -> None:
    """Also one whose own record is damaged: the run saves the names again."""
    manifest = save_archives(tmp_path, 3)
    flip(tmp_path / "c-rank1.tar", -100)
    quarantine_checkpoint(Folder(tmp_path), manifest)
    assert sorted(tree(tmp_path)) == ["c-rank0.tar.damaged", "c-rank1.tar.damaged"]
    save_archives(tmp_path, 4, overwrite=False)
