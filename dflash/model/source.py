"""Where a model's files are: a local folder, or a snapshot of a hub repository. No torch.

Weights are read from safetensors only (a pickle runs code). Not for: building modules.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import ConfigurationError, TemporaryError

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_VOLATILE = ("_name_or_path", "transformers_version", "_model_name_or_path")


def model_folder(
    model: str, revision: str | None = None, *, weights: bool = True, field: str = "target.model"
) -> Path:
    """Folder with the model's files, fetched from the hub where `model` is not a folder.

    `field` is where it was declared. Raises ConfigurationError for a model that does not exist,
    TemporaryError when the hub fails.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ConfigurationError(
            f"{field}: {model} is not a folder; give a hub id or the path of a model folder"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    patterns = ["*.json", "*.jinja", "*.model", "*.txt"] + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ConfigurationError(
            f"{field}: {model} at revision {revision or 'main'} is neither a folder nor on the hub; "
            "check the name, the revision and HF_TOKEN"
        ) from error
    except OSError as error:  # huggingface_hub's connection errors are OSErrors
        raise TemporaryError(
            f"{field}: the hub did not deliver {model} ({error}); "
            "try again, or give the path of a model folder"
        ) from error


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a model: its file, dtype (safetensors' spelling) and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """Every tensor in the folder's safetensors files, by name, from their headers alone."""
    places: dict[str, TensorPlace] = {}
    for file in weight_files(folder):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                places[name] = TensorPlace(file, entry["dtype"], tuple(entry["shape"]))
    return places


def weight_files(folder: Path) -> list[Path]:
    """The model's safetensors files in name order; ConfigurationError when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(
            f"target.model: {folder} has no *.safetensors, the only kind loaded; convert the model"
        )
    for file in files:
        if not file.exists():
            raise ConfigurationError(
                f"target.model: {file} is named in {index.name} but missing; fetch it again"
            )
    return files


def fingerprint(folder: Path) -> str:
    """Identity of a model: config.json, every tensor's name, dtype and shape, and sampled bytes.

    Two processes that loaded the same weights agree on it; it reads well under 1 MB a file.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for file in weight_files(folder):
        tensors = {name: entry for name, entry in _header(file).items() if name != "__metadata__"}
        digest.update(json.dumps(tensors, sort_keys=True).encode())
        size = file.stat().st_size
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _header(file: Path) -> dict[str, Any]:
    """A safetensors file's JSON header (8 bytes little-endian length, then JSON)."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > file.stat().st_size:
            raise ConfigurationError(
                f"target.model: {file} is no safetensors file or is cut short; fetch it again"
            )
        header: dict[str, Any] = json.loads(stream.read(length))
        return header
