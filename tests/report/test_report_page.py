"""The page of ``composerlite report`` in a browser."""

from __future__ import annotations

import html
import re
from pathlib import Path

from browser import Shown, open_page
from PIL import Image
from recorded_run import launch

from composerlite.report import collect_facts, render_page
from composerlite.report.formats import number

LIGHT, DARK = (246, 247, 249), (18, 22, 29)  # --bg in page.css
TRAINING, LOST = (37, 99, 201), (209, 73, 91)


def text_of(shown: Shown) -> str:
    """Return the visible text."""
    body = re.sub(r"<(style|script)\b.*?</\1>", "", shown.dom, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def pixels(picture: Path, colour: tuple[int, int, int]) -> int:
    """Count the pixels of about this colour."""
    with Image.open(picture) as image:
        counted = image.convert("RGB").getcolors(image.width * image.height) or []  # pyright: ignore
    return sum(many for many, one in counted if max(abs(a - b) for a, b in zip(one, colour, strict=True)) < 6)  # pyright: ignore


def written(place: Path, folder: Path, script: str = "") -> Path:
    """Write the page of the run in ``place``; ``script`` runs at the end."""
    page = folder / "report.html"
    text = render_page(collect_facts([str(place)]))
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return page


def test_page_is_self_contained(killed_run: Path, tmp_path: Path) -> None:
    """The page makes no other request and no error, and shows the facts and the charts."""
    shown = open_page(written(killed_run, tmp_path), tmp_path)
    assert shown.requests == ["http://report.test/report.html"]
    assert shown.console == []
    text = text_of(shown)
    for fact in (
        "tiny finished",
        "The run trained to its end, batch 24 (3ep),",
        "There were 3 launches: 2 killed, 1 finished.",
        "3 batches trained twice",
        "Goodput",
        "loss/train/total",
        "metrics/eval/MulticlassAccuracy",
        "ep2-ba24-rank0.pt",
        "save_interval",
    ):
        assert fact in text
    charts = shown.dom.count("data-chart=")
    assert charts == shown.dom.count('class="curve" d="M') > 3
    assert pixels(shown.picture, LIGHT) > 100_000
    assert pixels(shown.picture, TRAINING) > 2000
    assert pixels(shown.picture, LOST) > 100


def test_dark_mode(killed_run: Path, tmp_path: Path) -> None:
    """The page is dark on a dark system."""
    flags = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
    picture = open_page(written(killed_run, tmp_path), tmp_path, flags=flags).picture
    assert pixels(picture, DARK) > 100_000
    assert pixels(picture, LIGHT) < 1000


def test_names_are_escaped(killed_run: Path, tmp_path: Path) -> None:
    """HTML in the names of runs and metrics is shown as text."""
    record = tmp_path / "record.jsonl"
    evil = "</script><img src=http://evil.test/x onerror=alert(1)>\"'"
    text = (killed_run / "record.jsonl").read_text()
    quoted = evil.replace('"', '\\"')
    record.write_text(text.replace('"tiny"', f'"{quoted}"').replace("loss/train/total", quoted))
    shown = open_page(written(record, tmp_path), tmp_path)
    assert shown.requests == ["http://report.test/report.html"]
    assert shown.console == []
    assert evil in text_of(shown)


def test_run_of_one_batch(killed_run: Path, tmp_path: Path) -> None:
    """A run that was killed after its first batch has a page."""
    lines = (killed_run / "record.jsonl").read_text().splitlines()
    few = [line for line in lines[:8] if '"batch": 0,' in line or '"batch": 1,' in line]
    (tmp_path / "record.jsonl").write_text("\n".join(few) + "\n")
    shown = open_page(written(tmp_path / "record.jsonl", tmp_path), tmp_path)
    assert shown.console == []
    assert "to batch 1 of 3ep in" in text_of(shown)


def test_page_without_record(run_copy: Path, tmp_path: Path) -> None:
    """The page lists the checkpoints, and says how to get a record."""
    (run_copy / "record.jsonl").unlink()
    shown = open_page(written(run_copy, tmp_path), tmp_path)
    assert shown.console == []
    for text in ("There is no record of this run", "JSONLLogger", "ep2-ba24-rank0.pt"):
        assert text in text_of(shown)


def test_large_numbers_have_separators() -> None:
    """Digits of large numbers are grouped."""
    shown = [number(value) for value in (1234567, 1234567.8, 0.123456)]
    assert shown == ["1\u202f234\u202f567", "1\u202f234\u202f568", "0.1235"]


def test_page_fits_the_screen(killed_run: Path, tmp_path: Path) -> None:
    """No table is cut off at 1360 pixels, and a phone does not scroll the page sideways."""
    measure = """
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    const cut = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth);
    const root = document.documentElement;
    document.title = `cut ${cut.length} wide ${root.scrollWidth > root.clientWidth}`;
    """
    page = written(killed_run, tmp_path, measure)
    assert "<title>cut 0 wide false</title>" in open_page(page, tmp_path, size=(1360, 2400)).dom
    assert "wide false</title>" in open_page(page, tmp_path, size=(500, 2400)).dom


def test_log_scale_and_smoothing(killed_run: Path, tmp_path: Path) -> None:
    """Smoothed values are drawn beside the faint raw values; on a log scale equal ratios have equal distances."""
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
    shown = open_page(written(killed_run, tmp_path, script), tmp_path)
    assert shown.console == []
    assert "<title>different 3 raw true logarithmic true</title>" in shown.dom


def test_comparison_of_two_runs(killed_run: Path, tmp_path: Path) -> None:
    """Numbers, last values and different settings have two columns, and each chart has two curves."""
    assert launch(tmp_path / "other", "0", "1ep") == 0
    page = render_page(collect_facts([str(killed_run)]), collect_facts([str(tmp_path / "other")]))
    comparison = page.partition("<h2>Comparison</h2>")[2].partition("</section>")[0]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", comparison)
    compared = {name: (left, right) for name, left, right in rows}
    assert compared["batches"] == ("24", "8")
    assert compared["max_duration"] == ("3ep", "1ep")
    assert "seed" not in compared, "equal settings are left out"
    assert str(killed_run) in comparison, "runs of the same name are distinguished by their places"
    assert page.count("&quot;other&quot;: [[") == page.count("data-chart=") > 3
