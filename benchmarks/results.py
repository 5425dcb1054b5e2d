"""docs/results.md, docs/curves.png and README's section of results: every figure is read from a file under results/.

    python benchmarks/results.py            # rewrites them
    python benchmarks/results.py --check    # fails where one of them is not what results/ says

Tables are those of `pclmix compare`, over per-case files; figures of others are quoted in results/published.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pclmix.errors import PclmixError
from pclmix.files import atomic_path
from pclmix.report.significance import AVERAGE
from results_page import after, curves, phantom, speed, tables
from results_page.groups import COLUMNS, Group, pool, read_groups, upper_bounds

BEGIN, END = "<!-- results -->", "<!-- /results -->"
MADE = "Made by `python benchmarks/results.py` from the files under `results/`."


def page(root: Path) -> str:
    """docs/results.md."""
    lines = ["# Results", "", MADE, ""]
    groups = read_groups(root)
    if groups:
        published = tables.read_published(root)
        lines += [
            "## ACDC",
            "",
            "HD95 in mm, an empty prediction counted 50. Tables are those of `pclmix compare`.",
            "",
        ]
        for group in groups:
            lines += group_lines(group, published)
        if curves.read_curves(groups):
            lines += ["### Dice against training minutes", "", "![Dice against training minutes](curves.png)", ""]
            lines += [
                "Raw Dice of snapshots kept while training, from each run's curve.csv; nothing was chosen by them. "
                "The axis is stretched towards 100.",
                "",
            ]
        lines += ["### Published figures", "", *tables.published_tables(published)]
    lines += phantom.rows_lines(root)
    lines += [
        *speed.start_lines(root),
        *speed.step_lines(root),
        *speed.methods_lines(root),
        *speed.prediction_lines(root),
    ]
    lines += [*after.folder_lines(root), *after.uncertainty_lines(root), *after.export_lines(root)]
    return "\n".join(lines).rstrip() + "\n"


def group_lines(group: Group, published: dict[str, Any]) -> list[str]:
    table, notes = tables.comparison(group, published)
    lines = [f"### {group.about['title']}", ""]
    for words in filter(None, (group.about.get("note"), group.about.get("caveat"))):
        lines += [words, ""]
    lines += [*table, "", *(f"{note}  " for note in notes[:-1]), notes[-1], ""]
    lines += ["Dice / HD95 of each run in each column:", "", *tables.columns_table(group), ""]
    lines += ["What made them:", "", *tables.origin_table(group), ""]
    if group.absent:
        lines += [f"Planned and not run: {', '.join(group.absent)}.", ""]
    return lines


def readme_section(root: Path) -> str:
    """What stands between the markers: averages of the groups that ask for it, and where the rest is."""
    groups = [group for group in read_groups(root) if group.about.get("readme")]
    lines = [BEGIN]
    published = tables.read_published(root) if groups else {}
    for group in groups:
        table, _ = tables.comparison(group, published, average_only=True)
        said = " ".join(filter(None, [conditions(group, published), group.about.get("caveat")]))
        lines += [f"**{group.about['title']}.** {said}", "", *table, ""]
    if groups:
        lines += [
            "Dice in percent and HD95 in mm, mean (standard deviation) over volumes and classes, an empty prediction "
            "counted 50 mm; best bold, second underlined. "
            f"Paper: {published['paper']['terms']}. Classes, minutes, commits and curves: "
            "[docs/results.md](docs/results.md)."
        ]
    else:
        lines += ["What was measured so far: [docs/results.md](docs/results.md)."]
    return "\n".join([*lines, END])


def conditions(group: Group, published: dict[str, Any]) -> str:
    """In words: folds, volumes, steps, minutes, device; for a frozen recipe the figure itself and the paper's."""
    numbers = sorted({run.summary["fold"] for run in group.runs})
    folds = f"fold {numbers[0]}" if len(numbers) == 1 else f"folds {', '.join(map(str, numbers))}"
    volumes = len(pool(group.runs, "raw").cases) if group.pooled else len(group.runs[0].scores("raw").cases)
    steps = span([run.summary["steps"] for run in group.runs], ",d")
    minutes = f" in {span([run.summary['training_minutes'] for run in group.runs], '.1f')} minutes of training a run"
    minutes = "" if group.about.get("shared") else minutes
    devices = ", ".join(dict.fromkeys(run.summary["environment"]["device"] for run in group.runs))
    text = f"ACDC, {folds}, {volumes} volumes; {steps} steps{minutes}, {devices}."
    if group.pooled:
        raw = pool(group.runs, "raw")
        paper = published["paper"]["rows"]["pclmix"][AVERAGE]
        figure = f"Dice {100 * raw.mean('Dice').mean:.1f}, HD95 {raw.mean('HD95_50').mean:.1f} mm without any "
        text += f" {figure}post-processing; the paper's PCLMix has {paper[0]} and {paper[1]} over five folds."
        return text
    if group.column != "raw":
        text += f" Column: {COLUMNS.get(group.column, group.column)}."
    if group.against:
        text += f" †, ‡: p < 0.05, p < 0.01 against {group.against}."
    if upper_bounds(group):
        text += f" Not ranked: {', '.join(upper_bounds(group))}."
    return " ".join([text, *tables.network_notes(group)])


def span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def with_section(readme: str, section: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PclmixError(f"README.md has no lines {BEGIN} and {END}; put them where the results shall stand")
    return before + section + after


def update(root: Path, *, check: bool) -> list[str]:
    """Write what differs, or with `check` name it only."""
    readme = root / "README.md"
    texts = {
        root / "docs" / "results.md": page(root),
        readme: with_section(readme.read_text("utf-8"), readme_section(root)),
    }
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    picture, panels = root / "docs" / "curves.png", curves.read_curves(read_groups(root))
    if curves.drawn_from(picture) != (curves.fingerprint(panels) if panels else None):
        stale.append(picture)
    if check:
        return [str(path) for path in stale]
    for path in stale:
        if path in texts:
            with atomic_path(path) as temporary:
                temporary.write_text(texts[path], encoding="utf-8")
        elif panels:
            curves.draw(panels, picture)
        else:
            picture.unlink()
    return [str(path) for path in stale]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    args = parser.parse_args()
    try:
        stale = update(args.root, check=args.check)
    except PclmixError as error:
        sys.exit(str(error))
    if args.check and stale:
        sys.exit(f"{', '.join(stale)}: not what results/ says; run python {sys.argv[0]}")


if __name__ == "__main__":
    main()
