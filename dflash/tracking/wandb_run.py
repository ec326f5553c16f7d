"""Weights & Biases, at arm's length: nothing that happens to it can delay or end the work.

All calls to the package are made by one thread that reads a queue, since `wandb.init` may wait for
minutes on a dead network. Without the package, rows go to metrics.jsonl alone. Without a key, or
when the server does not answer, the run is written to a folder on this machine in W&B's own format;
`wandb sync FOLDER` sends it later. Each of these is said once.
"""

import logging
import netrc
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlparse

from dflash.resource.storage import Wandb
from dflash.tracking.jsonl import STEP, Row

if TYPE_CHECKING:
    from dflash.storage.store import Store

log = logging.getLogger(__name__)

INIT_SECONDS = 60.0
"""Longest wait for the W&B server at start; training does not wait with it."""
FINISH_SECONDS = 60.0
"""Longest wait at the end for rows to be sent; what is left stays on this machine."""

_API_KEY = "WANDB_API_KEY"


class WandbRun:
    """One W&B run, shared by all attempts of a training run through its id."""

    def __init__(
        self,
        spec: Wandb,
        *,
        run_id: str,
        name: str,
        config: Mapping[str, Any],
        folder: Path,
        earlier: list[Row],
        store: "Store | None" = None,
        key: str = "",
    ) -> None:
        """Start in the background; `earlier` are the rows of attempts before this one.

        `key` is where in the store the folders of offline runs are kept.
        """
        self._spec = spec
        self._run_id = run_id
        self._name = name
        self._config = dict(config)
        self._folder = folder
        self._earlier = earlier
        self._store = store
        self._key = key
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._run: Any = None
        self._offline = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Hand over a row; returns at once."""
        self._rows.put(row)

    def finish(self) -> None:
        """Send what is left, within `FINISH_SECONDS`, and say where an offline run lies."""
        self._rows.put(None)
        self._thread.join(timeout=FINISH_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "W&B did not finish within %.0f s; its files are kept: send them with `wandb sync %s`",
                FINISH_SECONDS,
                self._folder / "wandb" / f"*-{self._run_id}",
            )

    def _work(self) -> None:
        try:
            self._run = self._start()
        except ImportError:
            log.warning("the wandb package is not installed; metrics go to metrics.jsonl only")
        except Exception as error:  # noqa: BLE001 - W&B must never end a run
            log.warning("W&B cannot be used (%s); metrics go to metrics.jsonl only", _first_line(error))
        if self._run is None:
            self._drain()
            return
        try:
            self._send_rows()
        except Exception as error:  # noqa: BLE001 - W&B must never end a run
            log.warning("W&B failed (%s); metrics go on in metrics.jsonl", _first_line(error))
            self._drain()
        finally:
            self._close()

    def _start(self) -> Any:
        """The run, online where that can be had, else offline."""
        if self._spec.mode == "online":
            if _has_key():
                try:
                    return self._init("online")
                except Exception as error:  # noqa: BLE001 - any failure to get online means offline
                    log.warning(
                        "W&B cannot be reached (%s); metrics are written for `wandb sync`", _first_line(error)
                    )
                    import wandb

                    wandb.teardown()  # its service still holds the run's id
            else:
                log.warning(
                    "no W&B key: set %s (on a cluster: spec.tracking.wandb.secretRef); "
                    "metrics are written for `wandb sync`",
                    _API_KEY,
                )
        self._offline = True
        run = self._init("offline")
        # A folder that is synced later replaces what the server has under this id, so each one has
        # the whole history: no attempt's points are lost, whichever folders are sent.
        for row in self._earlier:
            run.log(_shown(row))
        return run

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        settings = wandb.Settings(
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            id=self._run_id,
            name=self._spec.run_name or self._name,
            config=self._config,
            dir=self._folder,
            mode=mode,
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            settings=settings,
        )
        # W&B's own step only goes up, and drops rows that go back: after a resume those would be lost.
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _send_rows(self) -> None:
        while (row := self._rows.get()) is not None:
            self._run.log(_shown(row))

    def _drain(self) -> None:
        while self._rows.get() is not None:
            pass

    def _close(self) -> None:
        folder = Path(self._run.dir).parent
        try:
            self._run.finish()
            import wandb

            wandb.teardown()  # waits for its service, which writes the last records after `finish` returns
        except Exception as error:  # noqa: BLE001 - W&B must never end a run
            log.warning("W&B did not finish cleanly (%s)", _first_line(error))
        if not self._offline:
            return
        log.info("W&B ran offline; send it with: wandb sync %s", folder)
        if self._store is None:
            return
        try:
            for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
                self._store.upload_file(f"{self._key}{folder.name}/{path.relative_to(folder)}", path)
        except Exception as error:  # noqa: BLE001 - W&B must never end a run
            log.warning("the W&B folder cannot be copied to %s (%s)", self._key, _first_line(error))


def _shown(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "time" and value is not None}


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _has_key() -> bool:
    """Whether W&B would find credentials without asking a person; tidies the environment's key.

    A secret made with `echo` ends in a newline, which W&B refuses.
    """
    key = os.environ.get(_API_KEY, "").strip()
    if key:
        os.environ[_API_KEY] = key
        return True
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    host = urlparse(wandb.Settings().base_url).hostname
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return path.exists() and host in netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError):
        return False
