"""What planning keeps of a Drafter in the store: GPU time counted so far, and rates that a warm-up measured.

Small objects, read by the command line, the operator and the training job alike. What they mean is in
`dflash.planning.spending` and `dflash.planning.warm_up`.
"""

import logging

from dflash import layout
from dflash.errors import DflashError
from dflash.planning.spending import Spending
from dflash.planning.warm_up import WarmUp
from dflash.storage.store import Store, to_json

log = logging.getLogger(__name__)


def read_spending(store: Store, name: str) -> Spending:
    """What was counted so far; nothing where nobody has counted."""
    document = store.find_json(layout.spending(name))
    return Spending.model_validate(document) if document else Spending()


def write_spending(store: Store, name: str, spending: Spending) -> None:
    """Put down what was spent. A store that is away is told, and gets the next copy."""
    try:
        store.put(layout.spending(name), to_json(spending.model_dump(by_alias=True)))
    except DflashError as error:
        log.warning("what was spent could not be written down: %s", error, extra={"drafter": name})


def find_warm_up(store: Store, name: str) -> WarmUp | None:
    """What a warm-up has measured for this Drafter; None where there was none."""
    document = store.find_json(layout.warm_up(name))
    return WarmUp.model_validate(document) if document else None
