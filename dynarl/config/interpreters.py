"""Which Python runs the workers of a role, and what it lacks.

Roles may have environments of their own, since SGLang and Megatron-core want different releases of torch. Where one is
named, the workers need there what `NEEDED` lists; dynarl itself comes from the agent.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dynarl.config.schema import Config

CHECKOUT = Path(__file__).resolve().parents[2]
# Where the worker of a role finds SGLang if the configuration does not say so.
SGLANG_VARIABLE = "DYNARL_SGLANG_PYTHON"
NEEDED = {
    "sglang": ("sglang", "zmq", "msgspec", "numpy"),
    "rollout": ("torch", "tokenizers", "safetensors", "zmq", "msgspec", "numpy"),
    "inference": ("torch", "megatron", "safetensors", "zmq", "msgspec", "numpy"),
    "training": ("torch", "megatron", "safetensors", "zmq", "msgspec", "numpy"),
}
LOOK_TIMEOUT_S = 60.0


def of_role(config: Config, role: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Path of the interpreter of "rollout", "inference" or "training"; None: the controller's own.

    rollout.python and the like, if set. Else, for SGLang, $DYNARL_SGLANG_PYTHON, or the one that bin/install-sglang has
    made in this checkout.
    """
    if (configured := getattr(config, role).python) is not None:
        return configured
    if role == "rollout" and config.rollout.engine == "sglang":
        made_here = CHECKOUT / ".cache" / "sglang-venv" / "bin" / "python"
        return environment.get(SGLANG_VARIABLE) or (str(made_here) if made_here.exists() else None)
    return None


def fault(config: Config, role: str, own: str) -> str | None:
    """What is wrong with the interpreter of a role on this machine, and what to do; None: nothing, or it is not another one.

    own: the controller's interpreter. The other one is started, and looks for modules without importing them.
    """
    needs_sglang = role == "rollout" and config.rollout.engine == "sglang"
    python = of_role(config, role)
    if python is None and not needs_sglang:
        return None
    python = python or own
    remedy = f"{role}.python names the interpreter"
    if needs_sglang:
        remedy = f"bin/install-sglang makes an environment for it, rollout.python or ${SGLANG_VARIABLE} names its interpreter"
    try:
        missing = _missing(python, NEEDED["sglang" if needs_sglang else role])
    except (OSError, subprocess.SubprocessError) as error:
        return f"the {role} workers' interpreter does not start here: {_reason(error)}; {remedy}"
    return f"{python}, which runs the {role} workers, has no {', '.join(missing)}; {remedy}" if missing else None


def _missing(python: str, modules: tuple[str, ...]) -> list[str]:
    code = f"import importlib.util as u; print(*[m for m in {modules!r} if u.find_spec(m) is None])"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [python, "-P", "-c", code], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LOOK_TIMEOUT_S, check=True,
    )  # fmt: skip
    return done.stdout.split()


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        last = (error.stderr.strip().splitlines() or [""])[-1]
        return f"{error.cmd[0]} ended with {error.returncode}: {last}"
    return str(error)
