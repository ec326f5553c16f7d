"""Reads a run's .wandb file back: what was really handed to W&B, with no server.

The file is a LevelDB log: blocks of 32 KiB, records of `crc32 | length | kind | payload`, where kinds
1 to 4 are a whole record and its first, middle and last piece; seven bytes of header come first.
Payloads are W&B's own protobuf records.
"""

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = 7


def records(path: Path) -> list[Any]:
    """All records of a .wandb file, in order."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    position, whole, found = _HEADER, b"", []
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        if kind == 0:
            break
        whole += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def history(path: Path) -> list[dict[str, Any]]:
    """The rows logged."""
    histories = (r.history for r in records(path) if r.WhichOneof("record_type") == "history")
    return [
        {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in history.item}
        for history in histories
    ]


def run(path: Path) -> Any:
    """The run's own record: id, name, project, configuration."""
    return next(r.run for r in records(path) if r.WhichOneof("record_type") == "run")


def metrics(path: Path) -> dict[str, str]:
    """Which metric is drawn against which axis."""
    found = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "metric":
            found[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return found
