"""Every row of the table on the phantom, from what benchmarks/rows.py kept."""

from __future__ import annotations

import json
from pathlib import Path

from pclmix.evaluate import read_summary
from pclmix.report import tables
from pclmix.report.runs import Run

UNRANKED = "full"


def rows_lines(root: Path) -> list[str]:
    folder = root / "results" / "rows"
    if not (folder / "rows.json").is_file():
        return []
    about = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    methods = about["methods"]
    runs = [Run(method, read_summary(folder / f"{method}.csv")) for method in methods]
    table = tables.build(runs, against=methods[0], unranked=[m for m in methods if m == UNRANKED])
    made = about["environment"]
    text = (
        f"The same comparison at toy size, to be repeated on any CPU: recipe `{about['recipe']}`, "
        f"{about['iterations']} steps each, seed {about['seed']}, commit {made['commit']} (benchmarks/rows.py). "
        "The phantom has clear edges, which favours the gated CRF and the random walker; real data is above."
    )
    return ["## Every method on the phantom", "", text, "", *tables.markdown(table).rstrip().splitlines(), ""]
