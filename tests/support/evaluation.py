"""One evaluation of a tiny target: prompts, a committed export, and the resource that names them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash import layout
from dflash.model.checkpoint import export_files
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from dflash.model.shape import resolve_shape
from dflash.resource import Drafter
from dflash.resource.load import load_resource
from dflash.storage.commit import write_commit
from dflash.storage.store import Store
from tests.support.tiny import save_tiny_target

DATASET, RUN, EVALUATION = "d" * 16, "a" * 16, "e" * 16


def write_resource(
    folder: Path,
    store: Store,
    *,
    evaluation: Mapping[str, Any] | None = None,
    target: Path | None = None,
    prompts: int = 40,
) -> Path:
    """A resolved resource file, with so many prompts, of which about half are held out."""
    target = target or save_tiny_target(folder / "target", "llama", layers=5)
    path = folder / "prompts.jsonl"
    rows = [
        {
            "id": f"p{i}",
            "group": ("code", "talk")[i % 2] + str(i % 10),
            "prompt": f"Question number {i}, please.",
        }
        for i in range(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    location = store.location
    resource = {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": "tiny"},
        "spec": {
            "target": {"model": str(target), "dtype": "float32"},
            "prompts": {"uri": str(path), "holdOut": 0.5},
            "storage": {"uri": location.uri, "endpoint": location.endpoint, "region": location.region},
            "drafter": {
                "layers": 1,
                "blockSize": 4,
                "taps": [1, 3],
                "slidingWindow": None,
                "maskTokenId": 300,
            },
            "evaluation": {
                "engine": "transformers",
                "samples": 6,
                "maxTokens": 12,
                "dtype": "float32",
                **(evaluation or {}),
            },
            "tracking": {"wandb": {"enabled": False}},
        },
    }
    file = folder / "drafter.json"
    file.write_text(json.dumps(resource))
    return file


def commit_export(store: Store, resource: Drafter, seed: int = 0) -> None:
    """An untrained drafter, exported as training exports."""
    facts = TargetFacts.from_folder(resource.spec.target.model)
    shape = resolve_shape(resource.spec.drafter, facts)
    files = export_files(DFlashDrafter(shape, seed), shape, facts)
    write_commit(store, layout.export(RUN), files, {})


def prepared(folder: Path, store: Store, **kwargs: Any) -> tuple[Path, Drafter]:
    """Both of the above."""
    path = write_resource(folder, store, **kwargs)
    resource = load_resource(path)
    commit_export(store, resource)
    return path, resource
