"""What Megatron-core needs to run on a machine without CUDA. Call `install()` before the first `import megatron`.

Megatron-core 0.19 takes a CUDA device for granted. Three things answer that, and none of them touches torch's own code paths:

- `torch.cuda.current_device()` names the CPU, and the calls that would start a CUDA context do nothing;
- optimizer code writes `device="cuda"` and compares `tensor.type()` with "torch.cuda.FloatTensor": `host_tensors()` answers
  such calls for as long as it is entered;
- modules that only GPUs, mixtures of experts or Megatron's own inference server use are absent while it is imported: they
  pull in triton (1 GB installed), the compiler and DTensor, which would double the start-up time of a worker.

Where CUDA is there, `install()` does nothing and `host_tensors()` is empty.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Iterator

import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")

# Not needed for dense models trained on one device per process. Each is imported at module level by something that is.
ABSENT = (
    "megatron.core.transformer.moe.ops",
)


def install() -> None:
    """Make `import megatron.core` work without CUDA. Safe to call twice; nothing is changed where there is CUDA."""
    if torch.cuda.is_available() or _installed():
        return
    sys.meta_path.insert(0, _AbsentModules())
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: HOST
    torch.cuda.current_stream = lambda *args: None  # asked for in every gradient sync, used only with several streams
    # Module-level decorators ask for torch.compile, and merely asking imports the compiler (0.8 s of CPU).
    compile_, torch.compile = torch.compile, lambda function=None, **options: function or (lambda f: f)
    try:
        import megatron.core  # noqa: F401
        from megatron.core import parallel_state
    finally:
        torch.compile = compile_
    # The one process-wide state that is used even when every process group is given.
    parallel_state._set_global_memory_buffer()


def host_tensors() -> contextlib.AbstractContextManager:
    """While entered, tensors that are asked for on "cuda" are made on the CPU, and CPU tensors call themselves CUDA ones."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _HostTensors()


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
    """A module whose every name is a class that cannot be made: good for annotations, isinstance and imports, for nothing else."""

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
