"""Trainer state on disk: the weights in Hugging Face form, the optimizer as one shard file per owner. No pickle.

    DIR/model/                     a complete Hugging Face directory
    DIR/optimizer/tp0-dp1.json     which elements of which parameter this shard covers, number of steps, sizes
    DIR/optimizer/tp0-dp1.safetensors

The distributed optimizer gives each data-parallel rank a range of every parameter's flat elements. The ranges are
written down, so a run may be restored with another number of owners; the tensor-parallel size must be the same. Files
appear by rename; whoever asked for the checkpoint marks it complete once every owner has answered.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

STATES = ("exp_avg", "exp_avg_sq")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be restored into this trainer."""


class Owned(NamedTuple):
    """What this rank's optimizer holds of parameter `name`: flat elements start:stop of `numel`, stepped as `main`."""

    name: str
    start: int
    stop: int
    numel: int
    main: torch.Tensor


def save(trainer: Any, directory: str) -> None:
    """Write this owner's part; all owners must call."""
    trainer.export(os.path.join(directory, "model"))
    root = Path(directory) / "optimizer"
    root.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {"rng": torch.get_rng_state()}
    ranges: dict[str, list[int]] = {}
    steps = 0
    for optimizer in _optimizers(trainer):
        # torch's Adam counts steps per parameter, fused ones (GPU) per group.
        steps = max([steps, *(int(group.get("step", 0)) for group in optimizer.optimizer.param_groups)])
        for part in _owned(optimizer, trainer.params):
            ranges[part.name] = [part.start, part.stop, part.numel]
            tensors[f"{part.name}:main"] = part.main.detach().clone()
            state = optimizer.optimizer.state.get(part.main, {})
            steps = max(steps, int(state.get("step", 0)))
            for key in STATES:
                tensors[f"{part.name}:{key}"] = state.get(key, torch.zeros_like(part.main)).detach().clone()
    name = _shard_name(trainer)
    about = {"tp": trainer.groups.tp.size(), "dp": trainer.groups.dp.size(), "steps": steps, "ranges": ranges}
    _replace(root / f"{name}.safetensors", lambda path: save_file(tensors, path))
    _replace(root / f"{name}.json", lambda path: path.write_text(json.dumps(about)))


@torch.no_grad()
def restore(trainer: Any, directory: str) -> None:
    """Take weights and optimizer state; all owners must call. Raises CheckpointError if they do not fit in here."""
    tp, rank = trainer.groups.tp.size(), trainer.groups.tp.rank()
    trainer.load(os.path.join(directory, "model"))
    root = Path(directory) / "optimizer"
    described = {path: json.loads(path.read_text()) for path in sorted(root.glob(f"tp{rank}-dp*.json"))}
    if not described:
        raise CheckpointError(f"{root} holds no optimizer state of tensor-parallel rank {rank}")
    for path, about in described.items():
        if about["tp"] != tp:
            raise CheckpointError(f"{path} was written with tensor-parallel size {about['tp']}, this trainer has {tp}")
        if about["dp"] != len(described):
            raise CheckpointError(
                f"{root} holds {len(described)} of the {about['dp']} shards of tensor-parallel rank {rank}"
            )
    with _open_all(described) as shards:
        for optimizer in _optimizers(trainer):
            for part in _owned(optimizer, trainer.params):
                _fill(optimizer.optimizer, part, shards)
        own = root / f"{_shard_name(trainer)}.json"
        torch.set_rng_state(shards[own if own in shards else next(iter(shards))][1].get_tensor("rng"))


def _fill(adam: torch.optim.Optimizer, part: Owned, shards: Any) -> None:
    state = {key: torch.zeros_like(part.main) for key in STATES}
    covered = 0
    for about, file in shards.values():
        start, stop, numel = about["ranges"].get(part.name, (0, 0, part.numel))
        if numel != part.numel:
            raise CheckpointError(f"{part.name} has {numel} elements in the checkpoint, {part.numel} here")
        low, high = max(start, part.start), min(stop, part.stop)
        if low >= high:
            continue
        covered += high - low
        for key, target in (("main", part.main), *state.items()):
            target[low - part.start : high - part.start] = file.get_slice(f"{part.name}:{key}")[
                low - start : high - start
            ]
    if covered != part.stop - part.start:
        raise CheckpointError(f"{part.name}: the shards cover {covered} of {part.stop - part.start} elements")
    steps = next(iter(shards.values()))[0]["steps"]
    if steps and isinstance(adam, torch.optim.Adam):
        # A tensor of its own for each parameter: it is counted up in place.
        adam.state[part.main] = {"step": torch.tensor(float(steps)), **state}
    elif steps:
        adam.state[part.main] = state
        for group in adam.param_groups:
            group["step"] = steps


def _optimizers(trainer: Any) -> list[Any]:
    if trainer.optimizer is None:
        raise RuntimeError("a borrowed trainer has no optimizer state")
    return trainer.optimizer.chained_optimizers


def _owned(optimizer: Any, params: dict[str, torch.Tensor]) -> Iterator[Owned]:
    names = {id(param): name for name, param in params.items()}
    kinds = (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    )
    for model_groups, main_groups in kinds:
        for models, mains in zip(model_groups, main_groups):
            for param, main in zip(models, mains):
                span = optimizer._get_model_param_range_map(param)["param"]
                yield Owned(names[id(param)], span.start, span.end, param.numel(), main)


def _shard_name(trainer: Any) -> str:
    return f"tp{trainer.groups.tp.rank()}-dp{trainer.groups.dp.rank()}"


class _open_all:
    """Open the safetensors file beside each description: {description path: (description, file)}."""

    def __init__(self, described: dict[Path, dict[str, Any]]):
        self._described = described

    def __enter__(self) -> dict[Path, tuple[dict[str, Any], Any]]:
        self._files = {
            path: safe_open(path.with_suffix(".safetensors"), framework="pt").__enter__() for path in self._described
        }
        return {path: (about, self._files[path]) for path, about in self._described.items()}

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.__exit__(*error)


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(partial)
    os.replace(partial, path)
