"""ONNX export: one self-describing file, optionally int8, compared with the original before it is kept.

int8 is static quantisation, calibrated on the user's images. Weights are signed and scaled per channel, activations
unsigned: the pair that VNNI multiplies.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pclmix import __version__
from pclmix.data.preprocess import windows
from pclmix.errors import PclmixError, need_extra
from pclmix.export.bundle import Card, checkpoint_card, markdown
from pclmix.export.compare import Difference, Sample, compare, find_samples
from pclmix.inference import load
from pclmix.inference.onnx import INPUT, OUTPUT, describe, load_onnx
from pclmix.inference.predictor import Predictor
from pclmix.io.files import atomic_path, require_new_file, write_json
from pclmix.nets.segmenter import Segmenter, fold_batchnorm
from pclmix.training.checkpoint import build_net, open_model


@dataclass(frozen=True)
class Scheme:
    """How activation ranges are measured, and which convolutions stay in float32 for accuracy."""

    name: str
    percentile: float | None  #: None: lowest and highest value seen
    floats: int  #: convolutions left in float32, counted from the output


#: Tried in this order until one is close enough. The last convolution is cheap and decides the label: never int8.
SCHEMES = (
    Scheme("min-max", None, 1),
    Scheme("99.999 percentile", 99.999, 1),
    Scheme("min-max, last two stages in float32", None, 5),
)


def quantise(source: Path, target: Path, scheme: Scheme, predictor: Predictor, samples: Sequence[Sample]) -> None:
    """Quantise the float32 model `source` to int8, calibrated on `samples`."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    extra: dict[str, Any] = {} if scheme.percentile is None else {"CalibPercentile": scheme.percentile}
    method = CalibrationMethod.MinMax if scheme.percentile is None else CalibrationMethod.Percentile
    with tempfile.TemporaryDirectory() as folder, quiet():
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(target),
            _Reader(predictor, samples),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=last_convolutions(onnx.load(str(prepared)).graph, scheme.floats),
            calibrate_method=method,
            extra_options=extra,
        )


def last_convolutions(graph: Any, count: int) -> list[str]:
    """Names of the nodes from the output back to the `count`-th last convolution."""
    names: list[str] = []
    convolutions = 0
    assert graph.output[0].name == OUTPUT
    for node in reversed(graph.node):  # nodes are stored in the order of execution
        names.append(node.name)
        convolutions += node.op_type == "Conv"
        if convolutions == count:
            break
    return names


class _Reader:
    """Calibration data reader: prepared slices, one at a time."""

    def __init__(self, predictor: Predictor, samples: Sequence[Sample]) -> None:
        self.slices = self._each(predictor, samples)

    @staticmethod
    def _each(predictor: Predictor, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        for sample in samples:
            for batch in predictor.batches(sample.image):
                h, w = predictor.about.seen
                for top, left in windows((batch.shape[2], batch.shape[3]), (h, w)):
                    for one in batch[..., top : top + h, left : left + w]:
                        yield {INPUT: np.ascontiguousarray(one[None])}

    def get_next(self) -> dict[str, Any] | None:
        return next(self.slices, None)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the output of torch's and onnxruntime's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


ExportPrecision = Literal["fp32", "fp16", "int8"]
OPSET = 20


def export_onnx(
    model: Path | str, out: Path | str, *, precision: ExportPrecision = "fp32", images: Path | str | None = None
) -> dict[str, Any]:
    """Write MODEL as OUT (.onnx, weights inside, any batch and size), the measured figures as .json and a card as .md.

    The export is compared on `images`, an image, a folder or a dataset (default: the phantom). For int8 one half of
    them is for calibration, the other for the comparison. An export that differs too much is not kept; the error has
    the figures. Returns the content of the .json.
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
        exported = {"precision": precision, **difference.rows()}
        temporary.write_text(markdown({**card, "export": exported}, out.stem), encoding="utf-8")
    return report


def trace(net: Segmenter, path: Path, channels: int, *, half: bool = False) -> None:
    """Write the network, BatchNorm folded, as ONNX: any batch, sides that are multiples of its coarsest stride."""
    step = net.multiple
    batch, rows, columns = (torch.export.Dim(name, min=1) for name in ("batch", "rows", "columns"))
    example = torch.zeros(2, channels, 2 * step, 3 * step)  # all sizes differ, so that none is confused with another
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
    """Write the metadata, and remove the exporter's notes, which contain local paths."""
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
