"""From trajectories as they come off the wire to the tensors of one forward pass.

A row holds prompt and response without the last token, padded at its end. The log-probability of response token j is
made at position num_prompt + j - 1; those positions are `picks`. Masks follow from lengths alone, never from a padding
id. Shapes: B samples, S positions, N response tokens of all samples, sample after sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch import Tensor

Sample = dict[str, Any]  # a wire.Trajectory as a dict


@dataclass
class MicroBatch:
    tokens_BS: Tensor
    picks_N: Tensor
    targets_N: Tensor
    counts: list[int]  # response tokens of each sample; they sum to N


def num_tokens(sample: Sample) -> int:
    """Tokens a sample brings into a forward pass, at least 1."""
    return max(1, (len(sample["prompt"]) + len(sample["response"])) // 4 - 1)


def collate(samples: Sequence[Sample], device: torch.device, multiple_of: int = 1) -> MicroBatch:
    """multiple_of: what the number of positions is padded to.

    Raises ValueError for a sample without a prompt: its first token would have no position to be predicted from.
    """
    for sample in samples:
        if not sample["prompt"]:
            raise ValueError(f"sample {sample['sample']!r} has an empty prompt")
    size = len(samples)
    width = -(-max(num_tokens(sample) for sample in samples) // multiple_of) * multiple_of
    rows = b"".join((sample["prompt"] + sample["response"])[: 4 * width].ljust(4 * width, b"\0") for sample in samples)
    counts = [len(sample["response"]) // 4 for sample in samples]
    counts_B = torch.tensor(counts)
    first_B = torch.tensor([len(sample["prompt"]) // 4 - 1 for sample in samples])
    row_N = torch.repeat_interleave(torch.arange(size), counts_B)
    within_N = torch.arange(len(row_N)) - (counts_B.cumsum(0) - counts_B)[row_N]
    picks_N = (first_B[row_N] + within_N) * size + row_N
    return MicroBatch(
        tokens_BS=_from_bytes(rows, torch.int32).view(size, width).long().to(device),
        picks_N=picks_N.to(device),
        targets_N=_from_bytes(b"".join(sample["response"] for sample in samples), torch.int32).long().to(device),
        counts=counts,
    )


def per_token(samples: Sequence[Sample], field: str, device: torch.device) -> Tensor:
    """A float32 field that has one value per response token, [N]. Raises ValueError where a sample lacks it."""
    for sample in samples:
        if sample.get(field) is None or len(sample[field]) != len(sample["response"]):
            raise ValueError(f"sample {sample['sample']!r} has no {field} for each of its response tokens")
    return _from_bytes(b"".join(sample[field] for sample in samples), torch.float32).to(device)


def per_sample(batch: MicroBatch, values: Sequence[float], device: torch.device) -> Tensor:
    """One value per sample, repeated for each of its response tokens, [N] float32."""
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), torch.tensor(batch.counts)).to(device)


def token_weights(batch: MicroBatch, samples: Sequence[Sample], device: torch.device) -> Tensor:
    """What each response token counts in the loss and in its denominator, [N] float32: the sample's weight, and 0 for a
    token that a tool wrote. Raises ValueError where a mask is not that of its response."""
    weights_N = per_sample(batch, [sample.get("weight", 1.0) for sample in samples], device)
    if not any(sample.get("mask") for sample in samples):
        return weights_N
    for sample, count in zip(samples, batch.counts):
        if sample.get("mask") and len(sample["mask"]) != count:
            raise ValueError(f"sample {sample['sample']!r}: a mask of {len(sample['mask'])} for {count} tokens")
    mask = b"".join(sample.get("mask") or b"\1" * count for sample, count in zip(samples, batch.counts))
    return weights_N * _from_bytes(mask, torch.uint8).to(device)


def split(values_N: Tensor, batch: MicroBatch, samples: Sequence[Sample]) -> dict[str, bytes]:
    """Values [N] back to one float32 byte string per sample id."""
    data, at, result = values_N.float().cpu().numpy().tobytes(), 0, {}
    for sample, count in zip(samples, batch.counts):
        result[sample["sample"]] = data[4 * at : 4 * (at + count)]
        at += count
    return result


def _from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
