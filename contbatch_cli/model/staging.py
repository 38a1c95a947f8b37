"""Lists of integers to the device in one copy: packed into one page-locked buffer, so that the host does not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch


def to_device(lists: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The lists as 1-D tensors on `device`, all views of one buffer."""
    packed = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype, pin_memory=device.type == "cuda")
    return list(packed.to(device, non_blocking=True).split([len(values) for values in lists]))
