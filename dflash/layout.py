"""Names of everything in the store: the one place where a key is spelled.

Keys are relative to the Drafter's prefix. Data comes first, under content-hashed or attempt-
specific names; the small object whose presence means "committed" comes last.

    datasets/<hash>/inputs.json           what was hashed, to read by eye and to refuse a mix-up
    datasets/<hash>/parts/<sha>.parquet   rows
    datasets/<hash>/parts/<id>.json       create-once: commits one part
    datasets/<hash>/manifest.json         create-once: commits the dataset
    datasets/<hash>/progress/<worker>.json
    drafters/<hash>/inputs.json
    drafters/<hash>/members/<role>-<index>.json   public keys and addresses of live processes
    drafters/<hash>/checkpoints/step-<n>-a<k>/{...,COMMIT.json}
    drafters/<hash>/LATEST.json           compare-and-swap, never to a lower attempt
    drafters/<hash>/export/{config.json,model.safetensors,COMMIT.json}
    drafters/<hash>/heartbeat.json, metrics.jsonl
    drafters/<hash>/measured/answers.json         create-once: the target's answers that are replayed
    drafters/<hash>/measured/wanted.json          the checkpoint to measure next
    drafters/<hash>/measured/step-<n>-a<k>.json   create-once: what a checkpoint accepts
    evaluations/<hash>/{inputs.json,progress.json,report.json,report.html,*.png}
    promoted/<name>.json                  compare-and-swap
    owners/<name>.json                    create-once
    records/<name>.json                   compare-and-swap
    spending/<name>.json                  GPU time so far, written by whoever runs the stages
    warm-ups/<name>.json                  rates that a warm-up has measured
"""


def owner(name: str) -> str:
    """Create-once: which Drafter (uid, and where it is declared) writes under this name."""
    return f"owners/{name}.json"


def record(name: str) -> str:
    """Compare-and-swap: attempts and budgets, as the executor on one machine wrote them down."""
    return f"records/{name}.json"


def spending(name: str) -> str:
    """GPU time that a Drafter has taken so far."""
    return f"spending/{name}.json"


def warm_up(name: str) -> str:
    """What the last warm-up of a Drafter measured."""
    return f"warm-ups/{name}.json"


def dataset(dataset_hash: str, name: str = "") -> str:
    """Key of something in a dataset's folder."""
    return f"datasets/{dataset_hash}/{name}"


def dataset_manifest(dataset_hash: str) -> str:
    """Its presence commits the dataset."""
    return dataset(dataset_hash, "manifest.json")


def drafter(drafter_hash: str, name: str = "") -> str:
    """Key of something in a drafter's folder."""
    return f"drafters/{drafter_hash}/{name}"


def heartbeat(drafter_hash: str) -> str:
    """The training stage's progress."""
    return drafter(drafter_hash, "heartbeat.json")


def member(drafter_hash: str, role: str, index: int) -> str:
    """Public key and address of one live process of a run."""
    return drafter(drafter_hash, f"members/{role}-{index}.json")


def checkpoint(drafter_hash: str, step: int, attempt: int, name: str = "") -> str:
    """Key of something in a checkpoint's folder."""
    return drafter(drafter_hash, f"checkpoints/step-{step:08d}-a{attempt}/{name}")


def latest(drafter_hash: str) -> str:
    """A hint at the newest checkpoint; only a verified COMMIT.json is trusted."""
    return drafter(drafter_hash, "LATEST.json")


def measured(drafter_hash: str, name: str = "") -> str:
    """Key of something in the folder of what was measured while training."""
    return drafter(drafter_hash, f"measured/{name}")


def export(drafter_hash: str, name: str = "") -> str:
    """Key of something in the export's folder."""
    return drafter(drafter_hash, f"export/{name}")


def evaluation(evaluation_hash: str, name: str = "") -> str:
    """Key of something in an evaluation's folder."""
    return f"evaluations/{evaluation_hash}/{name}"


def report(evaluation_hash: str) -> str:
    """Its presence commits the evaluation."""
    return evaluation(evaluation_hash, "report.json")


def promoted(name: str) -> str:
    """Which drafter serves under a name."""
    return f"promoted/{name}.json"


COMMIT = "COMMIT.json"
"""Written last in a folder of files: their names, sizes and sha256."""
