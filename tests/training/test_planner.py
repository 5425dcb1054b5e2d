"""Plans: the same text for the same data, values that a recipe can have, and choices that follow the data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pclmix.config import load_config
from pclmix.data.dataset import Dataset
from pclmix.data.survey import Survey, survey
from pclmix.errors import PclmixError
from pclmix.methods.base import require_fitting
from pclmix.training import probe
from pclmix.training.plan import plan_dataset
from pclmix.training.planner import CLOSE, ENLARGE, SIDE, Device, fitting_size, make_data_plan
from pclmix.training.probe import pixels_per_second

CPU, GPU = Device("cpu", bf16=False), Device("cuda", 139.0 * 2**30)


@pytest.fixture(scope="module")
def looked(phantom_dataset: Path) -> Survey:
    return survey(Dataset.open(phantom_dataset))


def changed(found: Survey, **facts: Any) -> Survey:
    """The same survey with other facts about its cases."""
    return replace(found, facts=tuple(replace(fact, **facts) for fact in found.facts))


@given(
    st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    st.floats(1, 600_000),
)
@settings(max_examples=60, deadline=None)
def test_sizes_fit_the_network_and_the_pixels(shape: tuple[int, int], area: float) -> None:
    h, w = fitting_size(shape, area)
    assert h % SIDE == w % SIDE == 0
    assert h * w <= max(area, SIDE * SIDE)
    scale = min(h / shape[0], w / shape[1], ENLARGE)
    sides = range(SIDE, int(math.sqrt(max(area, SIDE**2))) + SIDE, SIDE)
    squares = [min(n / shape[0], n / shape[1], ENLARGE) for n in sides if n * n <= area]
    assert scale >= CLOSE * max(squares, default=0) - 1e-9


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("minutes", [0.5, 5, 600])
def test_a_plan_is_a_recipe(looked: Survey, device: Device, minutes: float, tmp_path: Path) -> None:
    plan = make_data_plan(looked, device, minutes)
    assert plan == make_data_plan(looked, device, minutes)
    path = tmp_path / "mine.yaml"
    path.write_text(plan.text)
    for method in ("pclmix", "pce", "full"):
        config = load_config(str(path), method)
        assert config.model_copy(update={"recipe": "plan"}) == plan.config(method)
        require_fitting(config)
    config = plan.config()
    assert all(side % SIDE == 0 for side in config.data.seen)
    assert config.engine.seconds == pytest.approx(60 * 0.9 * minutes)
    assert config.habits == {name: list(words) for name, words in looked.dataset.habits.items()}
    assert config.data.ring_share > 0, "the phantom states a ring"


def test_more_time_gives_more_pixels(looked: Survey) -> None:
    big = changed(looked, shape=(5, 1000, 800))
    sizes = [math.prod(make_data_plan(big, CPU, minutes).config().data.seen) for minutes in (1, 5, 20)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    fast = make_data_plan(big, replace(CPU, rate=1e6), 5)
    assert math.prod(fast.config().data.seen) > sizes[1]


def test_a_small_gpu_gets_a_smaller_network(looked: Survey) -> None:
    big, small = changed(looked, shape=(1, 2000, 2000)), Device("cuda", 4 * 2.0**30, bf16=False)
    plan = make_data_plan(big, small, 600).config()
    assert plan.net == "resnet18"
    assert plan.engine.precision == "32"
    assert math.prod(plan.data.seen) < math.prod(make_data_plan(big, GPU, 600).config().data.seen)


def extents(short: float, count: int) -> tuple[tuple[float, ...], ...]:
    return ((500.0,), *[(short,)] * (count - 1))


def test_short_strokes_on_large_pictures_ask_for_patches(looked: Survey) -> None:
    count = looked.dataset.labels.count
    short = changed(looked, shape=(1, 3000, 2000), extents=extents(30, count))
    config = make_data_plan(short, CPU, 5).config()
    assert config.data.patch is not None
    assert config.data.size[0] > config.data.patch[0]
    assert config.data.size[0] / config.data.size[1] == pytest.approx(1.5, rel=0.02)
    assert config.data.ring_share == 0
    long = changed(looked, shape=(1, 600, 400), extents=extents(300, count))
    assert make_data_plan(long, CPU, 5).config().data.patch is None


def test_intensities(looked: Survey) -> None:
    plain = make_data_plan(changed(looked, dim=0.0), CPU).config().data
    assert plain.intensity == "slice"
    assert make_data_plan(changed(looked, dim=0.6), CPU).config().data.intensity == "volume"
    under = np.linspace(-50, 150, 100).astype(np.float32)
    ct = make_data_plan(changed(looked, low=(-1024.0,), high=(2000.0,), under=under), CPU).config().data
    assert ct.intensity == "window"
    assert ct.window is not None
    assert -200 < ct.window[0] < -50
    assert 150 < ct.window[1] < 300


def test_ring_found_in_strokes_is_optional(looked: Survey) -> None:
    silent = replace(looked, dataset=replace(looked.dataset, habits={}))
    assert not make_data_plan(silent, CPU).config().data.ring_share
    seen = tuple(replace(report, stated=False) for report in looked.habits if report.habit == "ring")
    assert make_data_plan(replace(silent, habits=seen), CPU).config().habits == {"background": ["ring"]}


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan, math.inf])
def test_minutes_must_be_a_number_above_0(looked: Survey, minutes: float) -> None:
    with pytest.raises(PclmixError, match="minutes"):
        make_data_plan(looked, CPU, minutes)


@pytest.mark.parametrize(("half", "expected"), [(1.5, "bf16"), (1.05, "32"), (0.2, "32")])
def test_a_cpu_uses_bf16_only_where_it_is_faster(
    half: float, expected: str, phantom_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"32": 200_000.0, "bf16": 200_000.0 * half}
    monkeypatch.setattr(probe, "_rate", lambda config, *_: speeds[config.engine.precision])
    dataset = Dataset.open(phantom_dataset)
    assert plan_dataset(dataset, device="cpu").config().engine.precision == "32", "nothing was timed"
    assert plan_dataset(dataset, device="cpu", timed=True).config().engine.precision == expected


def test_timing_leaves_randomness_alone(looked: Survey) -> None:
    import torch

    config = load_config("tiny", "pce")
    before = torch.random.get_rng_state()
    rate = pixels_per_second(config, 1, 4, torch.device("cpu"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert rate > 0
    assert math.log2(rate) * 2 == pytest.approx(round(math.log2(rate) * 2))


@pytest.mark.parametrize("device", [CPU, GPU, replace(GPU, memory=4.0 * 2**30)], ids=["cpu", "cuda", "small"])
@pytest.mark.parametrize("pictures", [False, True])
def test_every_value_has_a_reason(looked: Survey, device: Device, pictures: bool) -> None:
    found = changed(looked, shape=(1, 3000, 4000), unit="px") if pictures else looked
    text = make_data_plan(found, device, 3).text
    values = [line for line in text.splitlines() if not line.startswith("#") and not line.endswith(":")]
    assert len(values) > 15
    assert [line for line in values if not line.partition(" # ")[2]] == []
    assert ("volume's range" in text) is not pictures
