"""The order of slices depends on seed and step only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pclmix.data.store import Store
from pclmix.labels import IGNORE
from pclmix.training import feed as module
from pclmix.training.feed import Feed

CPU = torch.device("cpu")


def make_store(count: int) -> Store:
    """Slice n is full of n / 1024, which float16 holds exactly; its label is n."""
    images = np.full((count, 1, 2, 3), np.arange(count)[:, None, None, None] / 1024, np.float16)
    labels = np.full((count, 1, 2, 3), np.arange(count)[:, None, None, None], np.int16)
    return Store(images, labels, (), ("case",), np.zeros(count, np.int64), ((1.0, 1.0, 1.0),))


@given(count=st.integers(1, 40), batch=st.integers(1, 12), seed=st.integers(0, 2**31), epochs=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_every_slice_once_an_epoch(count: int, batch: int, seed: int, epochs: int) -> None:
    feed = Feed(make_store(count), batch, seed, CPU)
    steps = -(-count * epochs // batch)
    order = np.concatenate([feed.places(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(count=st.integers(1, 30), own=st.integers(1, 4), world=st.integers(1, 4), step=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_ranks_share_the_batch_of_one(count: int, own: int, world: int, step: int) -> None:
    store, batch = make_store(count), own * world
    alone = Feed(store, batch, 3, CPU).places(step)
    parts = [Feed(store, batch, 3, CPU, rank, world).places(step) for rank in range(world)]
    assert np.concatenate(parts).tolist() == alone.tolist()
    assert {len(part) for part in parts} == {own}


@pytest.mark.parametrize("resident", [True, False])
def test_feed_order_does_not_depend_on_the_start(monkeypatch: pytest.MonkeyPatch, resident: bool) -> None:
    monkeypatch.setattr(module, "_STEPS_AHEAD", 4)  # the table of indices is refilled within this test
    if not resident:
        monkeypatch.setattr(module, "_free_memory", lambda: 0)
    store = make_store(7)
    whole, late = Feed(store, 3, 5, CPU), Feed(store, 3, 5, CPU)
    buffers = [t.data_ptr() for t in (whole.image, whole.label, whole.index)]
    for step in range(12):
        whole.fill(step)
        assert whole.index.tolist() == whole.places(step).tolist()
        assert (whole.image[:, 0, 0, 0] * 1024).tolist() == whole.index.tolist()
        assert whole.label[:, 0, 1, 2].tolist() == whole.index.tolist()
        if step >= 5:
            late.fill(step)
            assert torch.equal(whole.image, late.image)
    assert [t.data_ptr() for t in (whole.image, whole.label, whole.index)] == buffers
    assert whole.image.dtype == torch.float32
    assert whole.label.dtype == torch.int64


@given(drawn=st.integers(1, 30), count=st.integers(30, 200), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_few_labelled_slices_fill_half_of_the_batches(drawn: int, count: int, seed: int) -> None:
    store = make_store(count)
    store.labels[drawn:] = IGNORE
    feed = Feed(store, 1, seed, CPU)
    epoch = len(feed.turns)
    order = np.array([feed.places(step)[0] for step in range(epoch)])
    assert set(order) == set(range(count)), "unlabelled slices take part too"
    assert (order < drawn).mean() >= 0.4
    if drawn < count / 3:
        assert (order < drawn).mean() <= 0.6


def test_slices_without_any_label_are_shown_once() -> None:
    store = make_store(5)
    store.labels[:] = IGNORE
    assert Feed(store, 5, 0, CPU).turns.tolist() == [0, 1, 2, 3, 4]


def test_seeds_give_other_orders() -> None:
    store = make_store(30)
    orders = {tuple(Feed(store, 30, seed, CPU).places(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_free_memory_is_read_from_the_system(tmp_path: Path) -> None:
    assert module._free_memory() > 0
