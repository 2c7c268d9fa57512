"""Ten ops on square inputs, for every contender the same: a function, and how many tensors it takes."""

from __future__ import annotations

import torch

SIZE = 8
OPS = {
    "add": (torch.add, 2),
    "mul": (torch.mul, 2),
    "mm": (torch.mm, 2),
    "relu": (torch.relu, 1),
    "exp": (torch.exp, 1),
    "sum": (lambda x: torch.sum(x, 0), 1),
    "mean": (lambda x: torch.mean(x, 1), 1),
    "nn.functional.softmax": (lambda x: torch.softmax(x, 1), 1),
    "t": (torch.t, 1),
    "amax": (lambda x: torch.amax(x, 0), 1),
}
