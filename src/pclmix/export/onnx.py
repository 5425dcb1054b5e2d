"""ONNX export: one self-describing file, run by onnxruntime and compared with the original before it is kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pclmix import __version__
from pclmix.errors import PclmixError, need_extra
from pclmix.export.card import Card, checkpoint_card, markdown
from pclmix.export.compare import Difference, compare
from pclmix.export.quantise import SCHEMES, quantise, quiet
from pclmix.export.samples import Sample, find_samples
from pclmix.inference import load
from pclmix.inference.onnx import INPUT, OUTPUT, describe, load_onnx
from pclmix.inference.predictor import Predictor
from pclmix.io.files import atomic_path, require_new_file, write_json
from pclmix.nets.segmenter import Segmenter, fold_batchnorm
from pclmix.training.checkpoint import build_net, open_model

ExportPrecision = Literal["fp32", "fp16", "int8"]
OPSET = 20


def export_onnx(
    model: Path | str, out: Path | str, *, precision: ExportPrecision = "fp32", images: Path | str | None = None
) -> dict[str, Any]:
    """Write MODEL as OUT (.onnx, weights inside, any batch and size), the measured figures as .json and a card as .md.

    `images`, an image, a folder or a dataset, are what the export is compared on (else the phantom) and what int8 is
    calibrated on; half of them are for either. An export that differs too much is not kept: the figures are in the
    error. Returns what the .json holds.
    """
    model, out = Path(model), Path(out)
    if out.suffix.lower() != ".onnx":
        raise PclmixError(f"{out}: an ONNX file must end in .onnx")
    figures, written = out.with_suffix(".json"), out.with_suffix(".md")
    for path in (out, figures, written):
        require_new_file(path)
    if precision == "int8" and images is None:
        raise PclmixError("--precision int8 needs --calibration IMAGES: a few images like those it will be used on")
    for library in ("onnx", "onnxruntime", "onnxscript"):
        need_extra(library, "export", "exporting to ONNX")
    original, checkpoint = load(model, device="cpu"), open_model(model)
    card = checkpoint_card(model, checkpoint)
    samples = find_samples(original.about, Path(images) if images is not None else None)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "model.onnx"
        net = build_net(checkpoint)
        trace(net, plain, len(original.about.channels), half=precision == "fp16")
        if precision == "int8":
            difference, scheme = _quantised(original, plain, samples, card)
        else:
            _describe(plain, original, precision, card)
            difference, scheme = compare(original, load_onnx(plain, device="cpu"), samples), None
        if not difference.acceptable(precision):
            raise PclmixError(f"the {precision} export differs too much and was not kept: {_shown(difference)}")
        with atomic_path(out) as temporary:
            temporary.write_bytes(plain.read_bytes())
    report = {
        "model": str(model),
        "precision": precision,
        "bytes": out.stat().st_size,
        "images": "phantom" if images is None else str(images),
        "scheme": scheme,
        **{("compared_on" if key == "images" else key): value for key, value in difference.to_json().items()},
        "version": __version__,
        "onnxruntime": metadata.version("onnxruntime"),
    }
    write_json(figures, report)
    with atomic_path(written) as temporary:
        temporary.write_text(markdown({**card, "export": {"precision": precision}}, out.stem), encoding="utf-8")
    return report


def trace(net: Segmenter, path: Path, channels: int, *, half: bool = False) -> None:
    """Write the network, BatchNorm folded, as ONNX: any batch, sides that are multiples of its coarsest stride."""
    step = net.multiple
    batch, rows, columns = (torch.export.Dim(name, min=1) for name in ("batch", "rows", "columns"))
    example = torch.zeros(2, channels, 2 * step, 3 * step)  # all sizes differ, so that none is taken for another
    shapes = {INPUT: {0: batch, 2: step * rows, 3: step * columns}}
    with quiet():
        torch.onnx.export(
            _Plain(fold_batchnorm(net), half).eval(),
            (example,),
            path,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=shapes,
            opset_version=OPSET,
            external_data=False,
            dynamo=True,
            verbose=False,
        )


class _Plain(nn.Module):
    """Encoder and decoder without the check of sides, which the dynamic shapes imply; float32 input and output."""

    def __init__(self, net: nn.Module, half: bool) -> None:
        super().__init__()
        self.net: Any = net.half() if half else net
        self.half_inside = half

    def forward(self, image: Tensor) -> Tensor:
        x = image.half() if self.half_inside else image
        logits: Tensor = self.net.decode(self.net.encoder(x))
        return logits.float()


def _quantised(original: Predictor, plain: Path, samples: Sequence[Sample], card: Card) -> tuple[Difference, str]:
    """Replace `plain` by the first int8 scheme that is close enough on images it was not calibrated on."""
    calibration, held = (samples[::2], samples[1::2]) if len(samples) > 1 else (samples, samples)
    tried: list[tuple[Difference, str]] = []
    for scheme in SCHEMES:
        candidate = plain.with_name("int8.onnx")
        quantise(plain, candidate, scheme, original, calibration)
        _describe(candidate, original, "int8", card)
        tried.append((compare(original, load_onnx(candidate, device="cpu"), held), scheme.name))
        if tried[-1][0].acceptable("int8"):
            os.replace(candidate, plain)
            return tried[-1]
    return max(tried, key=lambda pair: pair[0].argmax_agreement)


def _describe(path: Path, original: Predictor, precision: str, card: Card) -> None:
    """Write the metadata, and remove the exporter's notes, which name source files of this machine."""
    import onnx

    content = onnx.load(str(path))
    graph = content.graph
    for entry in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        entry.ClearField("metadata_props")
        if hasattr(entry, "doc_string"):
            entry.ClearField("doc_string")
    graph.ClearField("metadata_props")
    content.ClearField("metadata_props")
    onnx.helper.set_model_props(content, describe(original.about, __version__, precision, card))
    content.producer_name, content.producer_version = "pclmix", __version__
    onnx.checker.check_model(content, full_check=True)
    onnx.save(content, str(path))


def _shown(difference: Difference) -> str:
    change = difference.dice_change
    dice = f"{change:+.2f} points of Dice" if change is not None else f"Dice between them {difference.dice_between:.4f}"
    return (
        f"largest difference {difference.max_logit_difference:.3g} of a range of {difference.logit_range:.3g}, "
        f"{100 * difference.argmax_agreement:.3f} % of labels alike, {dice}; "
        "give more images like those it will be used on, or choose a higher precision"
    )
