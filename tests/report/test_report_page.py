"""The page of ``composerlite report`` in a browser."""

from __future__ import annotations

import html
import re
from collections import Counter
from pathlib import Path

from browser import Shown, open_page
from PIL import Image
from recorded_run import launch

from composerlite.report import facts_of, page_of
from composerlite.report.summary import story, tiles
from composerlite.report.words import number

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


def with_script(page: Path, script: str) -> Path:
    """``page``, at whose end ``script`` runs."""
    page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return page


def test_cards_and_story_say_different_things(killed_run: Path) -> None:
    """The numbers at the top are none of those in the sentence above them."""
    facts = facts_of([str(killed_run)])
    cards, text = [name for name, _, _ in tiles(facts)], " ".join(story(facts))
    assert cards == [
        "Goodput",
        "Throughput",
        "loss/train/total",
        "eval/loss",
        "Longest stall",
        "Newest checkpoint",
    ]
    assert [word for word in ("goodput", "/s", "loss", "Accuracy", "longest", "newest") if word in text] == []


def test_large_numbers_have_separators() -> None:
    """A reader counts no digits."""
    assert (number(1234567), number(1234567.8), number(0.123456)) == (
        "1\u202f234\u202f567",
        "1\u202f234\u202f568",
        "0.1235",
    )


def test_checkpoints_are_folded(killed_run: Path) -> None:
    """The list of checkpoints is one line until it is opened."""
    page = page_of(facts_of([str(killed_run)]))
    section = page.partition("<h2>Checkpoints that are kept</h2>")[2].partition("</section>")[0]
    assert section.startswith("<details><summary>")


def test_no_column_is_cut_off_on_a_wide_screen(killed_run: Path, tmp_path: Path) -> None:
    """At 1360 pixels every table is seen to its last column, and on a phone the page does not scroll sideways."""
    measure = """
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    const cut = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth);
    const root = document.documentElement;
    document.title = `cut ${cut.length} wide ${root.scrollWidth > root.clientWidth}`;
    """
    page = with_script(written([killed_run], tmp_path), measure)
    assert "<title>cut 0 wide false</title>" in open_page(page, tmp_path, size=(1360, 2400)).dom
    assert "wide false</title>" in open_page(page, tmp_path, size=(500, 2400)).dom


def test_curves_have_a_log_scale_and_smoothing(killed_run: Path, tmp_path: Path) -> None:
    """Smoothed values are drawn beside faint ones; on a log scale equal ratios are equally far."""
    script = """
    const chart = [...document.querySelectorAll("[data-chart]")].find((one) => one.textContent.includes("loss/train"));
    const drawn = () => chart.querySelector("path.curve").getAttribute("d");
    const set = (name, key, value) => {
      const control = document.getElementById(name);
      control[key] = value;
      control.dispatchEvent(new Event("input"));
    };
    const seen = [drawn()];
    set("smooth", "value", "0.9");
    seen.push(drawn());
    const raw = chart.querySelector("path.raw").getAttribute("d");
    set("smooth", "value", "0");
    set("log", "checked", true);
    seen.push(drawn());
    const labels = [...chart.querySelectorAll(".ytick")];
    const ticks = labels.map((one) => [Number(one.textContent), parseFloat(one.style.top)]);
    const slopes = ticks.slice(1).map(([value, top], at) => (ticks[at][1] - top) / Math.log10(value / ticks[at][0]));
    const even = slopes.length > 1 && Math.max(...slopes) / Math.min(...slopes) < 1.01;
    document.title = `different ${new Set(seen).size} raw ${raw.length > 0} logarithmic ${even}`;
    """
    shown = open_page(with_script(written([killed_run], tmp_path), script), tmp_path)
    assert shown.console == []
    assert re.search("<title>(.*)</title>", shown.dom)[1] == "different 3 raw true logarithmic true"  # pyright: ignore


def test_two_runs_side_by_side(killed_run: Path, tmp_path: Path) -> None:
    """Numbers, last values and settings that differ are in two columns, and each chart has both curves."""
    assert launch(tmp_path / "other", "0", "1ep") == 0
    one, two = facts_of([str(killed_run)]), facts_of([str(tmp_path / "other")])
    page = page_of(one, two)
    comparison = page.partition("<h2>Comparison</h2>")[2].partition("</section>")[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", comparison)
    told = {name: (left, right) for name, left, right in rows}
    assert told["batches"] == ("24", "8")
    assert told["max_duration"] == ("3ep", "1ep")
    assert "seed" not in told, "a setting that is the same is left out"
    assert str(killed_run) in comparison, "runs of one name are told apart by their places"
    assert page.count('<path class="other"') == page.count("data-chart=")
