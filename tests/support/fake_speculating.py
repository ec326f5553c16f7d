"""A fake of SGLang's server that speculates: equal answers whatever is proposed, accepted as it is told."""

from dataclasses import dataclass
from typing import Any

from tests.support.fake_engine import FakeSglang


@dataclass
class FakeSpeculating(FakeSglang):
    """As `FakeSglang`, with what `/server_info` and `meta_info` say of speculation."""

    block_size: int | None = None
    """None does not speculate."""
    accepts: int = 0
    """Drafts accepted in every verification."""
    crashes: int = 0
    """Requests that are still answered 500 once the warm-up is over, as by a server that has just died."""

    _warm: bool = False

    async def respond(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/server_info":
            self.paths[path] += 1
            algorithm = None if self.block_size is None else "DFLASH"
            return 200, {
                "version": "fake",
                "tp_size": 1,
                "speculative_algorithm": algorithm,
                "speculative_num_draft_tokens": self.block_size,
                "speculative_draft_model_path": "/somewhere",
            }
        if path == "/metrics":
            return 404, {}
        if path == "/flush_cache":
            self._warm = True
        if path == "/generate" and self._warm and self.crashes > 0:
            self.crashes -= 1
            return 500, {"error": {"message": "scheduler died"}}
        status, value = await super().respond(path, body)
        if path == "/generate" and status == 200:
            tokens = len(value["output_ids"])
            value["meta_info"]["e2e_latency"] = 0.01 * tokens / (1 + self.accepts)
            if self.block_size is not None:
                # The last verification counts whole, though the answer may end inside it.
                verifications = -(-(tokens - 1) // (1 + self.accepts))
                value["meta_info"]["spec_correct_drafts_histogram"] = [0] * self.accepts + [verifications]
        return status, value
