"""Static int8 quantisation, calibrated on the user's own images.

Weights are signed and scaled per channel, activations unsigned: the pair that VNNI multiplies.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pclmix.data.patches import windows
from pclmix.export.samples import Sample
from pclmix.inference.onnx import INPUT, OUTPUT
from pclmix.inference.predictor import Predictor


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
    """Silence what the exporters of torch and onnxruntime print and log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
