"""Reach one generator of the package reasoning-gym without importing all hundred of them.

`import reasoning_gym` imports every generator and with them sympy and matplotlib: 0.9 s of CPU and 110 MB, against
0.04 s and 15 MB for the one module that is needed (version 0.1.25). Each node runs a process that needs it, and starts
it anew whenever a verifier had to be killed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

PACKAGE = "reasoning_gym"


def create_dataset(category: str, name: str, **config: Any) -> Any:
    """The same data set as `reasoning_gym.create_dataset(name, **config)`; `category` is its subpackage.

    Raises ModuleNotFoundError when reasoning-gym is not installed or has no such module, ValueError when the module
    does not register `name`.
    """
    module = f"{PACKAGE}.{category}.{name}"
    if module not in sys.modules:
        _import_alone(module)
    return sys.modules[f"{PACKAGE}.factory"].create_dataset(name, **config)


def _import_alone(module: str) -> None:
    """Import a module while its parent packages are empty shells, so that their `__init__` does not run.

    The shells are taken away again: a later `import reasoning_gym` runs the real one and finds the module loaded.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package reasoning-gym is not installed (module {PACKAGE}): pip install reasoning-gym")
    root = spec.submodule_search_locations[0]
    category = module.split(".")[1]
    shells = []
    for name, directory in ((PACKAGE, root), (f"{PACKAGE}.{category}", f"{root}/{category}")):
        if name not in sys.modules:
            shell = types.ModuleType(name)
            shell.__path__ = [directory]
            sys.modules[name] = shell
            shells.append(name)
    try:
        importlib.import_module(module)
    finally:
        for name in shells:
            del sys.modules[name]
