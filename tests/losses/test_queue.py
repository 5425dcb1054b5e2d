from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pclmix.losses.contrast import PrototypeQueue, info_nce


def test_queue_by_hand() -> None:
    queue = PrototypeQueue(classes=2, width=1, length=3)
    assert not queue.filled.any()
    queue.enqueue(torch.tensor([[[1.0], [9.0]], [[2.0], [8.0]]]), torch.tensor([[True, False], [True, True]]))
    assert queue.entries.squeeze(2).tolist() == [[1, 2, 0], [8, 0, 0]]
    assert queue.filled.tolist() == [[True, True, False], [True, False, False]]
    queue.enqueue(torch.tensor([[[3.0], [7.0]], [[4.0], [6.0]]]), torch.tensor([[True, False], [True, False]]))
    assert queue.entries.squeeze(2).tolist() == [[4, 2, 3], [8, 0, 0]]
    assert queue.filled.tolist() == [[True, True, True], [True, False, False]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 99))
def test_queue_holds_the_last_of_each_class(k: int, length: int, batches: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    queue, reference = PrototypeQueue(k, 2, length), [deque[tuple[float, ...]](maxlen=length) for _ in range(k)]
    for batch in batches:
        rows, valid = torch.randn(batch, k, 2, generator=g), torch.rand(batch, k, generator=g) < 0.6
        queue.enqueue(rows, valid)
        for i in range(batch):
            for c in range(k):
                if valid[i, c]:
                    reference[c].append(tuple(rows[i, c].tolist()))
    for c in range(k):
        held = {tuple(row) for row in queue.entries[c][queue.filled[c]].tolist()}
        assert held == set(reference[c])
        assert int(queue.filled[c].sum()) == len(reference[c])


def test_queue_state_dict_round_trip() -> None:
    queue = PrototypeQueue(2, 3, 4)
    queue.enqueue(torch.randn(3, 2, 3), torch.ones(3, 2) > 0)
    other = PrototypeQueue(2, 3, 4)
    other.load_state_dict(queue.state_dict())
    rows = torch.randn(3, 2, 3)
    for q in (queue, other):
        q.enqueue(rows, torch.ones(3, 2) > 0)
    assert torch.equal(queue.entries, other.entries)
    assert torch.equal(queue.filled, other.filled)
    assert not list(queue.parameters())


def test_queue_may_change_between_loss_and_gradient() -> None:
    queue = PrototypeQueue(2, 3, 4)
    queue.enqueue(torch.randn(4, 2, 3), torch.ones(4, 2) > 0)
    label, valid = torch.tensor([0, 1]), torch.ones(2) > 0
    anchors = torch.randn(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(info_nce(anchors, label, valid, queue.entries, queue.filled), anchors)
    loss, place = info_nce(anchors, label, valid, queue.entries, queue.filled), queue.entries.data_ptr()
    rows = torch.randn(4, 2, 3, requires_grad=True)
    queue.enqueue(rows, torch.ones(4, 2) > 0)
    loss.backward()
    assert torch.equal(anchors.grad, expected)
    assert rows.grad is None
    assert not queue.entries.requires_grad
    assert queue.entries.data_ptr() == place, "a captured graph reads the buffer where it was"


RANK = """
import sys, torch, torch.distributed as dist
from pclmix.losses.contrast import PrototypeQueue
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
queue, rows = PrototypeQueue(2, 1, 5), torch.arange(8.0).view(4, 2, 1)
for turn in range(2):
    mine = rows[2 * rank : 2 * rank + 2] + 10 * turn
    queue.enqueue(mine, torch.tensor([[True, rank == turn], [True, False]]))
torch.save(queue.state_dict(), out)
dist.destroy_process_group()
"""


def test_two_processes_hold_the_same_queue(tmp_path: Path) -> None:
    outs = [tmp_path / f"{r}.pt" for r in range(2)]
    commands = [[sys.executable, "-c", RANK, str(r), str(tmp_path / "store"), str(outs[r])] for r in range(2)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [p.wait(timeout=120) for p in processes] == [0, 0]
    # As one process would hold it that saw both batches in rank order.
    queue, rows = PrototypeQueue(2, 1, 5), torch.arange(8.0).view(4, 2, 1)
    queue.enqueue(rows, torch.tensor([[True, True], [True, False], [True, False], [True, False]]))
    queue.enqueue(rows + 10, torch.tensor([[True, False], [True, False], [True, True], [True, False]]))
    for out in outs:
        state = torch.load(out, weights_only=True)
        assert torch.equal(state["entries"], queue.entries)
        assert torch.equal(state["count"], queue.count)
