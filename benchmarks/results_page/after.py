"""After training: what the uncertainty is worth, exported models, a folder of volumes."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from results_page.speed import markdown, read


def uncertainty_lines(root: Path) -> list[str]:
    lines: list[str] = []
    for name, record in read(root / "results" / "uncertainty", "*.json").items():
        rows = []
        for key, title in (("both_decoders", "both decoders"), ("cnn", "CNN decoder alone")):
            r = record[key]
            shown = [r["auroc"], r["auroc_near_heart"], r["spearman"], r["spearman_expected_dice"]]
            rows.append([title, *(f"{value:.3f}" for value in shown), f"{100 * r['expected_dice_gap']:.1f}"])
        heads = ["", "AUROC", "AUROC near the heart", "rank correlation", "of expected Dice", "its gap, points"]
        dice, cases = 100 * record["cnn"]["mean_dice"], len(record["cnn"]["cases"])
        run = root / "results" / "uncertainty" / Path(name).stem
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        made = json.loads((run / "environment.json").read_text(encoding="utf-8"))
        where = f"{made['threads']} CPU cores" if made["device"] == "cpu" else made["device"]
        side, engine = config["data"]["size"][0], config["engine"]
        budget = f"{engine['seconds'] / 60:.0f} minutes" if engine["seconds"] else f"{engine['iterations']:,d} steps"
        scaled = "not calibrated" if record["cnn"]["temperature"] == 1 else "calibrated on held-out scribbles"
        text = (
            f"A PCLMix run of ACDC's fold {record['fold']}, {dice:.1f} Dice raw over {cases} cases, {scaled}; it was "
            f"trained on {where} for {budget} at {side} x {side} (results/uncertainty/{run.name}). "
            "AUROC: does the entropy find wrong pixels. Rank correlation: of the quality estimate with the true Dice."
        )
        lines += [text, "", *markdown(heads, rows), ""]
    return ["## Uncertainty", "", *lines] if lines else []


def export_lines(root: Path) -> list[str]:
    rows = []
    for record in read(root / "results" / "export", "*.json").values():
        for batch, r in record["milliseconds"].items():
            size = " x ".join(str(side) for side in record["size"])
            times = [r["eager"], r["fp32"], r["fp16"], r["int8"]]
            rows.append([f"{size}, {batch}", *(f"{t:.0f}" for t in times), f"{r['int8_speedup']:.2f}"])
            rows[-1] += [f"{100 * record['dice']['eager']:.1f}", f"{record['dice']['change_points']:+.2f}"]
    if not rows:
        return []
    heads = [
        "",
        "eager fp32",
        "ONNX fp32",
        "ONNX fp16",
        "ONNX int8",
        "int8, times eager",
        "Dice, eager",
        "points more, int8",
    ]
    vnni = "with" if "avx512_vnni" in record["cpu"]["flags"] else "without"
    text = (
        "The same runs, exported, told apart by their Dice; ms a slice through the network, taking turns, on "
        f"{record['threads']} CPU cores {vnni} VNNI."
    )
    return ["## Export", "", text, "", *markdown(heads, rows), ""]


def folder_lines(root: Path) -> list[str]:
    lines: list[str] = []
    for r in read(root / "results" / "predict_folder", "*.json").values():
        alone = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in r["stages_alone_s"].items())
        lines.append(
            f"{r['volumes']} volumes of {r['slices']} slices on {r['cores']} CPU cores: {alone}, each alone; all "
            f"together {r['total_s']:.1f} s, {r['total_over_slowest']:.2f} of the slowest."
        )
    return ["## A folder of volumes", "", *lines, ""] if lines else []
