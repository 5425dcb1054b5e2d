"""The memory of equation 8: the latest prototypes of each class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pclmix.distributed import gather_rows
from pclmix.losses.precision import full

LENGTH = 500


class PrototypeQueue(nn.Module):
    """A ring of the last `length` prototypes for every class, background too; buffers, so that a checkpoint has it.

    entries: (K, Q, D). count: (K), how many were ever put in, so that count mod Q is the next place to write.
    """

    entries: Tensor
    count: Tensor

    def __init__(self, classes: int, width: int, length: int = LENGTH) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(classes, length, width))
        self.register_buffer("count", torch.zeros(classes, dtype=torch.int64))

    @property
    def filled(self) -> Tensor:
        """(K, Q) bool: the places that hold a prototype."""
        return torch.arange(self.entries.shape[1], device=self.count.device) < self.count[:, None]

    @torch.no_grad()
    def enqueue(self, prototypes: Tensor, valid: Tensor) -> None:
        """Put in the valid ones of prototypes (B, K, D), valid (B, K), of all ranks in rank order, oldest out first.

        Every rank must call this together; all then hold the same queue. The buffers change in place. Should there be
        more than Q of a class at once, the last Q stay.
        """
        # One message instead of two: the flag rides as one more column.
        flagged = gather_rows(torch.cat([full(prototypes), valid.unsqueeze(2).to(full(prototypes).dtype)], dim=2))
        prototypes, valid = flagged[:, :, :-1], flagged[:, :, -1] > 0
        rows, length = valid.shape[0], self.entries.shape[1]
        # Seen from each place of the ring, which row lands on it: places are few, and no two rows can collide.
        new = valid.sum(0)[:, None]
        turn = (torch.arange(length, device=new.device) - self.count[:, None]) % length
        # Of the rows turn, turn + Q, turn + 2Q, ... that land here the last one wins.
        nth = turn + (new - 1 - turn).clamp(min=0) // length * length
        valid_first = (~valid).to(torch.uint8).argsort(dim=0, stable=True).T
        row = valid_first.gather(1, nth.clamp(max=rows - 1))
        landed = prototypes.transpose(0, 1).gather(1, row[:, :, None].expand(-1, -1, prototypes.shape[2]))
        self.entries.copy_(torch.where((turn < new)[:, :, None], landed.to(self.entries.dtype), self.entries))
        self.count.add_(new.squeeze(1))
