"""Small committed datasets without a target: random prompts and answers, as generation would commit them."""

import hashlib

import numpy as np

from dflash.data.parts import Manifest, write_dataset
from dflash.data.rows import Row
from dflash.storage.store import Store


def synthetic_rows(
    count: int,
    *,
    seed: int = 0,
    vocabulary: int = 256,
    prompt: tuple[int, int] = (4, 12),
    answer: tuple[int, int] = (20, 48),
) -> list[Row]:
    """Rows with lengths drawn from [low, high); an answer repeats a short pattern, which can be learnt."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        prompt_ids = generator.integers(0, vocabulary, generator.integers(*prompt)).astype(np.int32)
        pattern = generator.integers(0, vocabulary, 5)
        length = int(generator.integers(*answer))
        output_ids = np.resize(pattern, length).astype(np.int32)
        key = hashlib.sha256(f"{seed}/{index}".encode()).hexdigest()[:16]
        rows.append(Row(f"{key}-0", prompt_ids, output_ids, prompt_index=index))
    return rows


def commit_synthetic_dataset(
    store: Store, dataset: str, count: int, *, seed: int = 0, part_rows: int = 16
) -> Manifest:
    """A dataset of `count` such rows in several parts, committed under `dataset`."""
    return write_dataset(store, dataset, synthetic_rows(count, seed=seed), part_rows=part_rows)
