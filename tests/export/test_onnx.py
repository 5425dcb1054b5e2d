"""ONNX export: one self-describing file that runs without torch and was compared before it was kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from pclmix.cli import app
from pclmix.errors import PclmixError
from pclmix.export.compare import SLICES, compare, find_samples, overlap, pooled_dice
from pclmix.export.onnx import export_onnx, last_convolutions, trace
from pclmix.inference import load
from pclmix.inference.files import predict_files
from pclmix.inference.onnx import open_session
from pclmix.inference.torch import load as load_model
from pclmix.io.files import read_json
from pclmix.io.volume import read_image
from pclmix.nets.segmenter import build_segmenter


@pytest.fixture(scope="module")
def exports(lively_model: Path, phantom_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each precision. The model is hardly trained, so its Dice is not tested."""
    folder = tmp_path_factory.mktemp("exports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pclmix.export.compare.DICE_POINTS", 100.0)
        patch.setattr("pclmix.export.compare.DISAGREEMENT", {"fp32": 1e-4, "fp16": 0.05, "int8": 0.5})
        for precision in ("fp32", "fp16", "int8"):
            export_onnx(lively_model, folder / f"{precision}.onnx", precision=precision, images=phantom_dataset)  # type: ignore[arg-type]
    return {precision: folder / f"{precision}.onnx" for precision in ("fp32", "fp16", "int8")}


@pytest.fixture(scope="module")
def volume(phantom_dataset: Path) -> np.ndarray:
    return read_image(phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz").array[0, 1:6, 20:90, 30:80]


def test_one_file_with_its_metadata(exports: dict[str, Path], lively_model: Path) -> None:
    for precision, path in exports.items():
        assert sorted(p.name for p in path.parent.glob(f"{precision}*")) == [
            f"{precision}.{end}" for end in ("json", "md", "onnx")
        ]
        content = onnx.load(str(path), load_external_data=False)
        said = {p.key: json.loads(p.value) for p in content.metadata_props}
        assert said["pclmix.labels"] == ["background", "RV", "Myo", "LV"]
        assert (said["pclmix.channels"], said["pclmix.size"]) == (["MRI"], [64, 64])
        assert (said["pclmix.intensity"], said["pclmix.precision"]) == ("slice", precision)
        assert not any(node.metadata_props or node.doc_string for node in content.graph.node)
        assert str(Path(__file__).parents[2]).encode() not in path.read_bytes(), "a path of this machine"
    before, after = load(lively_model, device="cpu").about, load(exports["fp32"]).about
    assert (after.labels, after.size, after.trained_on) == (before.labels, before.size, before.trained_on)
    assert len({load(path).about.identity for path in exports.values()}) == 3


def test_the_figures_of_an_export(exports: dict[str, Path], lively_model: Path, phantom_dataset: Path) -> None:
    report = read_json(exports["fp32"].with_suffix(".json"))
    original = load(lively_model, device="cpu")
    samples = find_samples(original.about, phantom_dataset)
    assert report["compared_on"] == [s.case for s in samples]
    assert set(report["compared_on"]) <= set(original.about.trained_on), "nothing is measured on a test fold"
    assert report["max_logit_difference"] < 1e-4 * report["logit_range"]
    assert report["argmax_agreement"] > 0.9999
    assert abs(report["dice_change_points"]) < 0.01
    eight = read_json(exports["int8"].with_suffix(".json"))
    assert eight["scheme"]
    assert 0 < eight["max_logit_difference"] < eight["logit_range"]
    assert eight["bytes"] < 0.4 * report["bytes"]
    assert len(eight["compared_on"]) == len(samples) // 2, "calibrated on some, compared on the others"


def test_predictions_equal_the_original(exports: dict[str, Path], lively_model: Path, volume: np.ndarray) -> None:
    original, export = load(lively_model, device="cpu"), load(exports["fp32"], batch=2)
    scale = np.abs(original.logits(volume)).max()
    np.testing.assert_allclose(export.logits(volume), original.logits(volume), atol=1e-4 * scale)
    assert (export.predict(volume) == original.predict(volume)).mean() > 0.9999
    for tta in ("none", "flip"):
        expected = original.probabilities(volume, tta=tta)
        np.testing.assert_allclose(export.probabilities(volume, tta=tta), expected, atol=1e-3)
        labels = export.predict(volume, tta=tta, largest_component=True)
        assert (labels == original.predict(volume, tta=tta, largest_component=True)).mean() > 0.999
    assert export.predict(volume).dtype == np.uint8
    assert (load(exports["fp16"]).predict(volume) == original.predict(volume)).mean() > 0.98


def test_batch_and_size_are_free(exports: dict[str, Path]) -> None:
    for path in exports.values():
        session = open_session(path)
        for shape in ((1, 1, 32, 32), (5, 1, 96, 160)):
            image = np.random.default_rng(0).random(shape, dtype=np.float32)
            assert session.run(None, {"image": image})[0].shape == (shape[0], 4, *shape[2:])


def test_command_predicts_with_an_export(exports: dict[str, Path], phantom_dataset: Path, tmp_path: Path) -> None:
    arguments = ["predict", str(exports["fp32"]), str(phantom_dataset), str(tmp_path / "out"), "--fold", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert read_json(tmp_path / "out" / "prediction.json")["identity"] == load(exports["fp32"]).about.identity


def test_uncertainty_of_an_exported_model(
    exports: dict[str, Path], lively_model: Path, phantom_dataset: Path, tmp_path: Path, volume: np.ndarray
) -> None:
    own, model = load(exports["fp32"]).examine(volume), load_model(lively_model, device="cpu")
    model.second = None  # an exported file has the CNN decoder alone
    original = model.examine(volume)
    np.testing.assert_allclose(own.entropy, original.entropy, atol=2e-3)
    assert own.quality.certainty == pytest.approx(original.quality.certainty, abs=1e-3)
    arguments = ["predict", str(exports["int8"]), str(phantom_dataset), str(tmp_path / "out"), "--fold", "1"]
    done = CliRunner().invoke(app, [*arguments, "--uncertainty", "--slicer", "--tta", "flip"])
    assert done.exit_code == 0, done.output
    for name in ("quality.csv", "slices.csv", "uncertainty/phantom001_frame01.nii.gz", "phantom001_frame01.seg.nrrd"):
        assert (tmp_path / "out" / name).is_file()


def test_no_torch_is_imported(exports: dict[str, Path], phantom_dataset: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pclmix.inference import load; from pclmix.inference.files import predict_files;"
        "predict_files(load(sys.argv[1]), sys.argv[2], sys.argv[3]).require_good();"
        "heavy = {'torch', 'monai', 'skimage', 'onnx'} & set(sys.modules); assert not heavy, heavy"
    )
    image = phantom_dataset / "imagesTr" / "phantom001_frame01_0000.nii.gz"
    subprocess.run([sys.executable, "-c", code, exports["int8"], image, tmp_path / "out.nii.gz"], check=True)
    assert (tmp_path / "out.nii.gz").is_file()


def test_an_export_that_differs_is_not_kept(
    lively_model: Path, phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(net: torch.nn.Module, path: Path, channels: int, *, half: bool = False) -> None:
        with torch.no_grad():
            net.decoder.head.bias += torch.tensor([0.0, 3.0, 0.0, 0.0])  # type: ignore[union-attr, operator]
        trace(net, path, channels, half=half)  # type: ignore[arg-type]

    monkeypatch.setattr("pclmix.export.onnx.trace", spoilt)
    with pytest.raises(PclmixError, match="fp32"):
        export_onnx(lively_model, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_invalid_exports_are_refused(exports: dict[str, Path], tiny_run: Path, tmp_path: Path) -> None:
    def attempt(words: str, *arguments: str) -> None:
        done = CliRunner().invoke(app, ["export", str(tiny_run), *arguments])
        assert isinstance(done.exception, PclmixError), done.output
        assert words in str(done.exception)

    attempt("must end in .onnx", str(tmp_path / "a.pt"))
    attempt("exists already", str(exports["fp32"]))
    attempt("needs --calibration", str(tmp_path / "a.onnx"), "--precision", "int8")
    attempt("does not exist", str(tmp_path / "a.onnx"), "--images", str(tmp_path / "none"))
    assert not list(tmp_path.iterdir())


def test_other_onnx_files_are_refused(exports: dict[str, Path], tmp_path: Path) -> None:
    def attempt(words: str, path: Path) -> None:
        with pytest.raises(PclmixError, match=words):
            load(path)

    attempt("does not exist", tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    attempt("cannot be run by onnxruntime", tmp_path / "text.onnx")
    whole = exports["fp32"].read_bytes()
    (tmp_path / "half.onnx").write_bytes(whole[: len(whole) // 2])
    attempt("cannot be run by onnxruntime", tmp_path / "half.onnx")
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    other = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "other", [info], [
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    ])  # fmt: skip
    model = onnx.helper.make_model(other, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(tmp_path / "other.onnx"))
    attempt("not one of `pclmix export`", tmp_path / "other.onnx")
    content = onnx.load(str(exports["fp32"]))
    for prop in content.metadata_props:
        if prop.key == "pclmix.labels":
            prop.value = '["background", "RV"]'
    onnx.save(content, str(tmp_path / "changed.onnx"))
    attempt("4 classes, its metadata says 1 and 2", tmp_path / "changed.onnx")
    with pytest.raises(PclmixError, match="no CUDA"):
        load(exports["fp32"], device="cuda")
    with pytest.raises(PclmixError, match=r"1 channel\(s\) \(MRI\)"):
        load(exports["fp32"]).predict(np.zeros((2, 3, 8, 8)))
    with pytest.raises(PclmixError, match="empty"):
        load(exports["fp32"]).predict(np.zeros((0, 8, 8)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 0),
        ("temperature", -1.0),
        ("temperature", None),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
        ("size", [10**9, 10**9]),
        ("size", [0, 0]),
        ("size", [64]),
        ("size", [64.0, 64.0]),
        ("size", [30, 30]),
        ("size", "64"),
        ("labels", "abcd"),
        ("labels", []),
        ("labels", [0, 1, 2, 3]),
        ("channels", []),
        ("ignore", "4"),
        ("intensity", "ct"),
        ("intensity", None),
        ("aspect", "crop"),
        ("dataset", 3),
        ("trained_on", "case1"),
        ("trained_on", [1]),
    ],
)
def test_invalid_metadata_is_refused_at_loading(
    exports: dict[str, Path], tmp_path: Path, key: str, value: object
) -> None:
    content = onnx.load(str(exports["fp32"]))
    for prop in content.metadata_props:
        if prop.key == f"pclmix.{key}":
            prop.value = json.dumps(value)
    onnx.save(content, str(tmp_path / "changed.onnx"))
    with pytest.raises(PclmixError, match=r"changed\.onnx"):
        load(tmp_path / "changed.onnx")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5_000])
def test_metadata_that_is_not_json_is_refused(exports: dict[str, Path], tmp_path: Path, text: str) -> None:
    content = onnx.load(str(exports["fp32"]))
    content.metadata_props[0].value = text
    onnx.save(content, str(tmp_path / "changed.onnx"))
    with pytest.raises(PclmixError, match=r"changed\.onnx"):
        load(tmp_path / "changed.onnx")


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(
    exports: dict[str, Path], tmp_path: Path, which: int, value: float
) -> None:
    """One such weight makes all or some pixels background, without an error."""
    content = onnx.load(str(exports["fp32"]))
    tensors = [t for t in content.graph.initializer if len(t.dims) == 4]
    array = onnx.numpy_helper.to_array(tensors[which]).copy()
    array.flat[0] = value
    tensors[which].CopyFrom(onnx.numpy_helper.from_array(array, tensors[which].name))
    onnx.save(content, str(tmp_path / "changed.onnx"))
    with pytest.raises(PclmixError, match=r"changed\.onnx.*NaN"):
        load(tmp_path / "changed.onnx")


def test_every_network_exports(tmp_path: Path) -> None:
    net = build_segmenter("unet", 2, 3).eval()
    image = torch.rand(3, 2, 48, 32)
    with torch.no_grad():
        expected = net(image).numpy()
    trace(net, tmp_path / "unet.onnx", 2)
    given = open_session(tmp_path / "unet.onnx").run(None, {"image": image.numpy()})[0]
    np.testing.assert_allclose(given, expected, atol=1e-4)
    graph = onnx.load(str(tmp_path / "unet.onnx")).graph
    last = last_convolutions(graph, 1)
    assert next(node.op_type for node in graph.node if node.name in last) == "Conv"


def test_samples(lively_model: Path, phantom_dataset: Path, tmp_path: Path) -> None:
    about = load(lively_model, device="cpu").about
    folder = tmp_path / "images"
    shutil.copytree(phantom_dataset / "imagesTr", folder)
    bare = find_samples(about, folder, count=3)
    assert [s.reference for s in bare] == [None] * 3
    assert all(s.image.shape[1] <= SLICES for s in bare)
    phantom = find_samples(about, None, count=2)
    assert all(s.reference is not None and s.reference.shape == s.image.shape[1:] for s in phantom)
    original = load(lively_model, device="cpu")
    same = compare(original, original, bare[:1])
    assert (same.max_logit_difference, same.argmax_agreement, same.dice_between) == (0, 1, 1)
    assert same.dice_change is None


def test_pooled_dice() -> None:
    labels, reference = np.array([0, 1, 1, 2, 0]), np.array([0, 1, 2, 2, 2])
    counts = overlap(labels, reference, 4)
    assert counts.tolist() == [[2, 2, 2, 0], [3, 3, 4, 0]]
    assert pooled_dice(counts) == pytest.approx((2 / 3 + 2 / 4) / 2)
    assert pooled_dice(overlap(np.zeros(3, int), np.zeros(3, int), 4)) == 1.0


def test_a_huge_volume_is_streamed(exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared slices of a volume are never all in memory: here they would have forty times its size."""
    import tracemalloc

    import nibabel as nib

    tall = np.random.default_rng(0).integers(0, 255, (20, 20, 1500), dtype=np.uint8)
    nib.save(nib.Nifti1Image(tall, np.eye(4)), tmp_path / "tall.nii")
    monkeypatch.setattr("pclmix.inference.files._PREPARED", 2**20)
    predictor = load(exports["fp32"], batch=8)
    tracemalloc.start()
    predict_files(predictor, tmp_path / "tall.nii", tmp_path / "out.nii.gz").require_good()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * tall.nbytes, f"{peak / tall.nbytes:.1f} times the volume"
