"""The page of ``composerlite report`` in a browser."""

from __future__ import annotations

import html
import re
from collections import Counter
from pathlib import Path

from browser import Shown, open_page
from PIL import Image

from composerlite.report import facts_of, page_of

LIGHT, DARK = (246, 247, 249), (18, 22, 29)  # --bg in page.css
TRAINING, WASTED = (37, 99, 201), (209, 73, 91)


def text_of(shown: Shown) -> str:
    """What there is to read."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", shown.dom, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).replace("\u00a0", " ").split())


def colours(picture: Path) -> Counter[tuple[int, int, int]]:
    """How many pixels there are of each colour."""
    with Image.open(picture) as image:
        pixels = image.convert("RGB")
        counted = pixels.getcolors(pixels.width * pixels.height)
    return Counter({colour: many for many, colour in counted or []})  # pyright: ignore


def near(counted: Counter[tuple[int, int, int]], colour: tuple[int, int, int]) -> int:
    """How many pixels have about this colour."""
    return sum(many for one, many in counted.items() if max(abs(a - b) for a, b in zip(one, colour, strict=True)) < 6)


def written(places: list[Path], folder: Path) -> Path:
    """The page of the run in ``places``."""
    page = folder / "report.html"
    page.write_text(page_of(facts_of([str(place) for place in places])), encoding="utf-8")
    return page


def test_a_browser_shows_the_page_and_asks_for_nothing_else(killed_run: Path, tmp_path: Path) -> None:
    """One request, that of the page; no word on the console; the facts are there to read, and the charts to see."""
    shown = open_page(written([killed_run], tmp_path), tmp_path)
    assert shown.requests == ["http://report.test/report.html"]
    assert shown.console == []
    text = text_of(shown)
    assert "tiny finished" in text
    assert "The run trained to its end, batch 24, 3ep," in text
    assert "It took 3 launches: 2 were killed; the last reached its end." in text
    assert "3 batches were trained twice" in text
    for fact in (
        "Goodput",
        "loss/train/total",
        "metrics/eval/MulticlassAccuracy",
        "ep2-ba24-rank0.pt",
        "save_interval",
    ):
        assert fact in text
    assert shown.dom.count('class="pointer"') == shown.dom.count("data-chart="), "the script of the page has run"
    counted = colours(shown.picture)
    assert near(counted, LIGHT) > 100_000
    assert near(counted, TRAINING) > 2000
    assert near(counted, WASTED) > 100


def test_dark_for_those_who_want_it_dark(killed_run: Path, tmp_path: Path) -> None:
    """Where the system is dark, so is the page."""
    flags = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
    counted = colours(open_page(written([killed_run], tmp_path), tmp_path, flags=flags).picture)
    assert near(counted, DARK) > 100_000
    assert near(counted, LIGHT) < 1000


def test_names_from_outside_are_text(killed_run: Path, tmp_path: Path) -> None:
    """A run is named by whoever wrote its manifests and its record: nothing in there becomes a part of the page."""
    record = tmp_path / "record.jsonl"
    evil = "</script><img src=http://evil.test/x onerror=alert(1)>\"'"
    text = (killed_run / "record.jsonl").read_text()
    quoted = evil.replace('"', '\\"')
    record.write_text(text.replace('"tiny"', f'"{quoted}"').replace("loss/train/total", quoted))
    shown = open_page(written([record], tmp_path), tmp_path)
    assert shown.requests == ["http://report.test/report.html"]
    assert shown.console == []
    assert evil in text_of(shown)


def test_one_batch_is_no_error(killed_run: Path, tmp_path: Path) -> None:
    """A run that was killed after its first batch has a page without an error, too."""
    lines = (killed_run / "record.jsonl").read_text().splitlines()
    few = [line for line in lines[:8] if '"batch": 0,' in line or '"batch": 1,' in line]
    (tmp_path / "record.jsonl").write_text("\n".join(few) + "\n")
    shown = open_page(written([tmp_path / "record.jsonl"], tmp_path), tmp_path)
    assert shown.console == []
    assert "to batch 1 in" in text_of(shown)


def test_without_a_record_the_page_says_what_is_missing(run_copy: Path, tmp_path: Path) -> None:
    """From manifests alone come the saves, and how to get the rest."""
    (run_copy / "record.jsonl").unlink()
    shown = open_page(written([run_copy], tmp_path), tmp_path)
    assert shown.console == []
    text = text_of(shown)
    assert "There is no record of this run here" in text
    assert "JSONLLogger" in text
    assert "ep2-ba24-rank0.pt" in text
