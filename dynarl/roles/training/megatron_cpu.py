"""What Megatron-core needs to run on a machine without CUDA. Call `install()` before the first `import megatron`.

Megatron-core 0.19 takes CUDA and NCCL for granted. Five things answer that, none of which changes how torch computes:

- `torch.cuda.current_device()` names the CPU, and the calls that would start a CUDA context do nothing;
- optimizer code writes `device="cuda"` and compares `tensor.type()` with "torch.cuda.FloatTensor": `host_tensors()`
  answers such calls for as long as it is entered;
- the dispatcher of mixtures of experts brings split sizes to the host without streams;
- the pieces that ranks exchange for experts are padded to one size, which is all that gloo can exchange;
- modules for what this project does not use are left out, and what Megatron can do without is kept from it while it is
  imported: triton (1 GB installed), the compiler, DTensor and sympy. A training worker is ready after 1.4 s of CPU
  instead of 2.3 s (torch alone takes 1.05 s) and has 275 MB resident instead of 365 MB, which counts with many of them
  on a node.

Where CUDA is there, `install()` does nothing and `host_tensors()` is empty.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")

# Left out for good. Each is imported at module level by something that is needed, and is itself needed only for
# mixtures of experts, fully sharded models, Megatron's own checkpoints and models of several modalities.
ABSENT = (
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies",
    "megatron.core.distributed.fsdp",
    "megatron.core.models.mimo",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
    "megatron.core.transformer.moe.ops",
)

# Megatron imports these if it can. They are hidden only while it is being imported; others may import them later.
HIDDEN = ("torch.distributed._tensor", "torch.distributed.tensor")


def install() -> None:
    """Make `import megatron.core` work without CUDA. Safe to call twice; nothing is changed where there is CUDA."""
    if torch.cuda.is_available() or _installed():
        return
    sys.meta_path.insert(0, _AbsentModules())
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: HOST
    torch.cuda.current_stream = lambda *args: None  # asked for in every gradient sync, used only with several streams
    # Module-level decorators ask for torch.compile, and merely asking imports the compiler.
    compile_, torch.compile = torch.compile, lambda function=None, **options: function or (lambda f: f)
    hidden = [name for name in HIDDEN if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))
    try:
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
        from megatron.core import parallel_state
    finally:
        torch.compile = compile_
        for name in hidden:
            del sys.modules[name]
    # The one process-wide state that is used even when every process group is given.
    parallel_state._set_global_memory_buffer()
    _dispatch_without_streams()
    _exchange_uneven_pieces()


def leave_out_compiler() -> None:
    """Put a stand-in in the place of `torch._dynamo`. For worker processes only: nothing can be compiled afterwards.

    torch's optimizers call its `graph_break` at every step, which does nothing outside compiled code; importing the
    compiler for that costs a worker up to 1 s of CPU and 85 MB. Nothing is changed where there is CUDA or the compiler
    is there already.
    """
    if torch.cuda.is_available() or "torch._dynamo" in sys.modules:
        return
    stand_in = types.ModuleType("torch._dynamo")
    stand_in.graph_break = lambda *args, **kwargs: None
    stand_in.disable = lambda function, *args, **kwargs: function
    # Cleared whenever a torch world is entered after the compiler has been imported.
    stand_in.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    sys.modules["torch._dynamo"] = torch._dynamo = stand_in


def host_tensors() -> contextlib.AbstractContextManager:
    """While entered, tensors asked for on "cuda" are made on the CPU, and CPU tensors call themselves CUDA ones."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _HostTensors()


def _dispatch_without_streams() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def splits_to_host(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if torch.is_tensor(value := getattr(self, name)):
                    setattr(self, name, value.numpy())
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = HOST  # else the first dispatcher would make one
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = splits_to_host


def _exchange_uneven_pieces() -> None:
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def padded(piece: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([piece, piece.new_zeros(size - len(piece), *piece.shape[1:])])

    def gather_uneven(piece: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(piece, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        mine = padded(piece, max(sizes))
        pieces = [torch.empty_like(mine) for _ in sizes]
        torch.distributed.all_gather(pieces, mine, group=group)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes)])

    def scatter_uneven(whole: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(whole, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        pieces = [padded(piece, max(sizes)) for piece in whole.split(sizes)]
        mine = torch.empty_like(pieces[0])
        torch.distributed.reduce_scatter(mine, pieces, group=group)
        return mine[: sizes[group.rank()]].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


def _installed() -> bool:
    return any(isinstance(finder, _AbsentModules) for finder in sys.meta_path)


class _HostTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs = {**kwargs, "device": HOST}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class _Absent(types.ModuleType):
    """A module whose every name is a class without instances: enough for imports, annotations and isinstance."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(cls: type, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is left out on machines without CUDA")

        value = type(name, (), {"__new__": refuse})
        setattr(self, name, value)
        return value


class _AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == absent or name.startswith(absent + ".") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
