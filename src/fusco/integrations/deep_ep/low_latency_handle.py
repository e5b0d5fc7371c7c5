"""The handle of DeepEP's low-latency dispatch, and formats of its rows; letters are those of ``low_latency``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import torch

from fusco.core.quantization import Quantize
from fusco.integrations.deep_ep.base import Rows
from fusco.integrations.expert_rows import SentRows

_BITS_OF_COUNT = 32  # of an element of ``LowLatencyHandle.layout_range``
_TILE_ROWS, _TILE_COLUMNS = 128, 4  # of NVFP4 scales; a tile has 32 x 4 rows


class LowLatencyHandle(Sequence[Any]):
    """The handle of a low-latency dispatch: in DeepEP a tuple of five, whose tensors are computed when first read.

    Elements are ``src_info``, ``layout_range``, T, H and E.
    """

    def __init__(self, sent: SentRows, num_max_tokens: int, hidden: int, *, may_outlive_plan: bool = False) -> None:
        """With ``may_outlive_plan`` ranks may be masked before the handle is used again, which ends the plan."""
        self.sent, self.num_max_tokens, self.hidden = sent, num_max_tokens, hidden
        self.routing = sent  # of a combine: the dispatch, or one that was made again without ranks that are masked
        self._numbers = sent.topology.numbers  # of the ranks
        self._order: torch.Tensor | None = None  # of rows in that routing; as they are
        if may_outlive_plan:
            self._sources  # noqa: B018  computed now, and kept

    def renew(self, routing: SentRows) -> None:
        """Take a dispatch of the same ids among fewer ranks, for combines."""
        present = torch.tensor(routing.topology.numbers, device=self._sources.device)
        is_left = self._is_row & torch.isin(self._sources[..., 0], present)
        self.routing, self._order = routing, (~is_left).byte().sort(dim=1, stable=True).indices[..., None]

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (E / R, R * T, H) that are in the order of the dispatch in that of the routing."""
        return rows if self._order is None else rows.gather(1, self._order.expand_as(rows))

    @cached_property
    def src_info(self) -> torch.Tensor:
        """The token of each row, int32 (E / R, R * T), undefined behind an expert's last row.

        Tokens of another node's ranks are counted without those that no rank of this node has an expert for.
        """
        return self._sources[..., 1].int()

    @cached_property
    def layout_range(self) -> torch.Tensor:
        """First row and number of rows from each rank, int64 (E / R, R): the first in the upper 32 bits."""
        counts, num_ranks = self.sent.dispatched.num_rows_per_expert, self.sent.comm.placement.world_size
        num_local = len(counts)
        src = torch.where(self._is_row, self._sources[..., 0], num_ranks)
        from_ranks = counts.new_zeros(num_local, num_ranks + 1).scatter_add_(1, src, torch.ones_like(src))[:, :-1]
        return ((from_ranks.cumsum(1) - from_ranks) << _BITS_OF_COUNT) | from_ranks

    @property
    def source_ranks(self) -> torch.Tensor:
        """The rank that each row came from, (E / R, R * T), undefined behind an expert's last row."""
        return self._sources[..., 0]

    @property
    def _is_row(self) -> torch.Tensor:
        counts = self.sent.dispatched.num_rows_per_expert
        return torch.arange(self._sources.shape[1], device=counts.device) < counts[:, None]

    @cached_property
    def _sources(self) -> torch.Tensor:
        sources = self.sent.handle.plan.slot_to_source.view(*self.sent.handle.rows_shape, 2)
        if len(self._numbers) < self.sent.comm.placement.world_size:  # ranks are masked
            number_of = torch.tensor(self._numbers, device=sources.device)
            sources = torch.stack((number_of[sources[..., 0]], sources[..., 1]), -1)
        return sources

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"a handle has {len(self)} elements, got {place}")
        if place % len(self) == 0:
            return self.src_info
        if place % len(self) == 1:
            return self.layout_range
        return (self.num_max_tokens, self.hidden, self.sent.num_experts)[place % len(self) - 2]


def fp8_format(round_scale: bool, use_ue8m0: bool) -> Quantize:
    """Return the format of ``use_fp8``."""
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0=True needs round_scale=True: exponents are those of powers of two")
    return Quantize(scale="ue8m0" if use_ue8m0 else "power-of-two" if round_scale else "float32", layout="tma")


def nvfp4_rows(
    x: torch.Tensor, x_global_scale: torch.Tensor | None, use_fp8: bool, use_ue8m0_for_sf: bool
) -> tuple[torch.Tensor, Quantize]:
    """Return rows times the caller's scale, float32, and the format of ``use_nvfp4``: the scale stays on its device."""
    if use_fp8:
        raise ValueError("use_fp8=True and use_nvfp4=True exclude each other: rows have one format")
    if use_ue8m0_for_sf:
        raise NotImplementedError("fusco's NVFP4 rows have scales of e4m3, not of ue8m0: use_ue8m0_for_sf=True")
    if x_global_scale is None or x_global_scale.numel() != 1:
        given = x_global_scale if x_global_scale is None else f"shape {tuple(x_global_scale.shape)}"
        raise ValueError(f"use_nvfp4=True needs x_global_scale of one element, got {given}")
    return x.float() * x_global_scale, Quantize("nvfp4", layout="swizzled")


def as_deep_ep_returns(payloads: Sequence[torch.Tensor], quantize: Quantize | None) -> Rows:
    """Return masked rows, or rows and scales; those of NVFP4 as views (R * T, H / 2, E / R) and (32, 4, ..., E / R)."""
    if quantize is None:
        return payloads[0]
    rows, scales = payloads
    if quantize.format != "nvfp4":
        return rows, scales
    num_local, num_rows, num_columns = scales.shape
    tiles = scales.view(num_local, num_rows // _TILE_ROWS, num_columns // _TILE_COLUMNS, 32, 4, _TILE_COLUMNS)
    return rows.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)
