"""A general plug-in of SGLang: brings what DFLASH lacks on a machine without a GPU.

Found by SGLang through the entry point beside this file, when this folder is on PYTHONPATH; nothing of
SGLang is changed on disk. Three operators that its CPU build leaves out, an answer to whether the platform
can speculate, and attention for verification forwards. Correct and slow.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch


def activate() -> None:
    """Called by SGLang in each of its processes."""
    _define_operators()
    _allow_speculation()
    _attend_when_verifying()
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


class _Speculating:
    """SGLang's platform, which also says that it can speculate."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, *_: Any) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, _algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def get_default_speculative_draft_attention_backend(self, *_: Any) -> str:
        return "torch_native"


def _allow_speculation() -> None:
    from sglang.srt.arg_groups import choices, speculative_hook

    speculative_hook.current_platform = _Speculating(speculative_hook.current_platform)
    # One list, which the draft worker reads too.
    if "torch_native" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _define_operators() -> None:
    library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    signature = (
        "(Tensor rows, Tensor(a!) table, Tensor start, Tensor end, Tensor(b!) locations, int width) -> ()"
    )
    moves = "(Tensor pointers, Tensor strides, Tensor target, Tensor source) -> ()"
    operators = {
        f"assign_req_to_token_pool_cpu{signature}": _write_locations,
        f"assign_extend_cache_locs_cpu{signature}": _read_locations,
        f"copy_all_layer_kv_cache_cpu{moves}": _copy_rows,
    }
    for definition, body in operators.items():
        name = definition.split("(")[0]
        if hasattr(torch.ops.sgl_kernel, name):
            continue
        library.define(definition)
        library.impl(name, body, "CPU")
    globals()["_library"] = library  # operators live as long as their library


def _spans(rows: Any, start: Any, end: Any) -> Iterator[tuple[int, slice, slice]]:
    """Each request's row, its columns in the table, and where these are in the flat list of locations."""
    place = 0
    for row, low, high in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        yield row, slice(low, high), slice(place, place + high - low)
        place += high - low


def _write_locations(  # noqa: PLR0917 - the operator's signature
    rows: Any, table: Any, start: Any, end: Any, locations: Any, width: int
) -> None:
    del width
    for row, columns, places in _spans(rows, start, end):
        table[row, columns] = locations[places].to(table.dtype)


def _read_locations(  # noqa: PLR0917 - the operator's signature
    rows: Any, table: Any, start: Any, end: Any, locations: Any, width: int
) -> None:
    del width
    for row, columns, places in _spans(rows, start, end):
        locations[places] = table[row, columns].to(locations.dtype)


def _copy_rows(pointers: Any, strides: Any, target: Any, source: Any) -> None:
    """In every buffer, row `source[i]` to row `target[i]`; strides in bytes. Sources are read first."""
    moves = list(zip(target.tolist(), source.tolist(), strict=True))
    for base, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source_row * stride, stride) for _, source_row in moves]
        for (target_row, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(base + target_row * stride, row, stride)


def _attend_when_verifying() -> None:
    """Forwards of a block carry no prefix lengths: n rows a request, behind what is cached."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    plain = TorchNativeAttnBackend.forward_extend

    def forward_extend(  # noqa: PLR0917 - the method's signature
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        if forward_batch.extend_prefix_lens is not None:
            return plain(self, q, k, v, layer, forward_batch, save_kv_cache, **more)
        lengths = forward_batch.seq_lens
        rows = q.view(-1, layer.tp_q_head_num * layer.qk_head_dim).shape[0] // len(lengths)
        kept = forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens, forward_batch.seq_lens
        forward_batch.extend_prefix_lens = lengths
        forward_batch.extend_seq_lens = torch.full_like(lengths, rows)
        forward_batch.seq_lens = lengths + rows
        try:
            return plain(self, q, k, v, layer, forward_batch, save_kv_cache, **more)
        finally:
            forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens, forward_batch.seq_lens = kept

    TorchNativeAttnBackend.forward_extend = forward_extend
