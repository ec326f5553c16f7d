"""Metrics over time: a row every few seconds, to metrics.jsonl always and to W&B where it can be had.

Not for how far a stage is (`dflash.progress`), nor for what an evaluation found
(`dflash.evaluation.report`).
"""

from dflash.tracking.tracker import Tracker

__all__ = ["Tracker"]
