"""Every row of the table on the phantom, from what benchmarks/rows.py kept."""

from __future__ import annotations

from pathlib import Path

from pclmix.evaluate import read_summary
from pclmix.files import read_json
from pclmix.report import tables
from pclmix.report.runs import Run

UNRANKED = "full"


def rows_table(folder: Path) -> str:
    """The table of `pclmix compare` over the methods in a folder of rows.py, against the first of them."""
    methods = read_json(folder / "rows.json")["methods"]
    runs = [Run(method, read_summary(folder / f"{method}.csv")) for method in methods]
    return tables.markdown(tables.build(runs, against=methods[0], unranked={UNRANKED}.intersection(methods)))


def rows_lines(root: Path) -> list[str]:
    folder = root / "results" / "rows"
    if not (folder / "rows.json").is_file():
        return []
    about = read_json(folder / "rows.json")
    text = (
        f"The same comparison at toy size, to be repeated on any CPU: recipe `{about['recipe']}`, "
        f"{about['iterations']} steps each, seed {about['seed']}, commit {about['environment']['commit']} "
        "(benchmarks/rows.py). The order is the phantom's; that of real data is above."
    )
    return ["## Every method on the phantom", "", text, "", *rows_table(folder).rstrip().splitlines(), ""]
