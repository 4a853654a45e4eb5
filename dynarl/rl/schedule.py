"""Learning rate of an optimizer step."""

from __future__ import annotations


def warmed_up_lr(lr: float, step: int, warmup_steps: int) -> float:
    """Linear warm-up: step 0 runs at lr / warmup_steps, step warmup_steps - 1 and later at lr.

    >>> [warmed_up_lr(1.0, step, 4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return lr * min(1.0, (step + 1) / warmup_steps) if warmup_steps else lr
