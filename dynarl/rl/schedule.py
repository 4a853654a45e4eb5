"""Learning rate of an optimizer step."""

from __future__ import annotations


def warmed_up_lr(lr: float, step: int, warmup_steps: int) -> float:
    """Linear warm-up: step 0 runs at lr / warmup_steps, step warmup_steps - 1 and later at lr.

    >>> [warmed_up_lr(1.0, step, 4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return lr * min(1.0, (step + 1) / warmup_steps) if warmup_steps else lr


# Of a supervised stage: share of its steps in which the rate rises, and what it falls to at the end.
WARM_UP_SHARE, FINAL_SHARE = 0.08, 0.1


def supervised_lr(lr: float, step: int, num_steps: int) -> float:
    """Rate of step 0 .. num_steps - 1: a linear rise over the first steps, a linear fall to a tenth over all of them.

    A short stage ends much lower with the fall than without it: the last steps then average out the noise of small batches.
    >>> [round(supervised_lr(1.0, step, 100), 2) for step in (0, 7, 50, 99)]
    [0.12, 0.93, 0.5, 0.1]
    """
    rise = min(1.0, (step + 1) / max(1.0, WARM_UP_SHARE * num_steps))
    return lr * rise * max(FINAL_SHARE, 1.0 - step / num_steps)
