from __future__ import annotations

import pytest
import torch

from pclmix.turns import draw_turns, turn


@pytest.mark.parametrize("size", [(5, 5), (4, 6)])
def test_each_image_turns_by_its_own_and_back(size: tuple[int, int]) -> None:
    x = torch.rand(32, 2, *size)
    turns = draw_turns(x, torch.Generator().manual_seed(0))
    assert set(turns.tolist()) == ({0, 1, 2, 3} if size[0] == size[1] else {0, 2})
    turned = turn(x, turns)
    for before, after, quarters in zip(x, turned, turns.tolist(), strict=True):
        assert torch.equal(after, torch.rot90(before, quarters, (1, 2)))
    assert torch.equal(turn(turned, -turns), x)
