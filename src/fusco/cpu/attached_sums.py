"""Small combine: the sums of a node for another go there with a record, as rows of a small dispatch do.

Ranks write their partial sums to shared memory before they publish their records within the node. When all are there,
and equal, a rank adds the sums of the rows that it holds, and sends them to its counterparts with its record. So a rank
waits twice, for its node and for its counterparts, and sends one message to each other node.
"""

from __future__ import annotations

import numpy as np
import torch

from fusco.control.record_round import Attachment
from fusco.core.profile import Call
from fusco.core.rows import accumulation_dtype
from fusco.core.wire import Wire
from fusco.cpu.kernels.add_quantized_rows import add_quantized_rows
from fusco.cpu.kernels.attached_sums import Holders, add_returned_sums, fold_attached_sums, produce_attached_sums
from fusco.cpu.kernels.sum_rows import Terms
from fusco.cpu.memory import CpuMemory
from fusco.cpu.plan import CpuPlan
from fusco.cpu.wire_rows import write_sums


class AttachedSums:
    """Sums of one rank in a combine whose dispatch attached its rows, so that counterparts hold each other's rows."""

    def __init__(
        self, plan: CpuPlan, memory: CpuMemory, terms: Terms, wire: Wire, dtype: torch.dtype, call: Call
    ) -> None:
        """Write this rank's partial sums to its shared memory; rows, and the result, have ``dtype``."""
        self._plan, self._memory, self._terms, self._call = plan, memory, terms, call
        self._wire, self._dtype = wire, dtype
        self._first_row = np.array(plan.routing.src_to_first_row)
        produce_attached_sums(terms, Holders(memory.sources, self._first_row, memory.sums_out))
        self._own_sums = torch.empty(0, dtype=torch.float32, device="cpu")  # of this rank's tokens

    def attach(self) -> Attachment:
        """Return the sums for other nodes; all ranks of this node have written theirs."""
        memory, hidden = self._memory, self._terms.hidden
        sources, first_row = memory.sources[memory.local], self._first_row
        num_rows = first_row[sources + 1] - first_row[sources]
        num_held, num_own = int(num_rows.sum()), int(num_rows[-1])
        sums = torch.empty(num_held, hidden, dtype=accumulation_dtype(self._dtype), device="cpu")
        num_peer_rows = fold_attached_sums(self._terms, Holders(memory.sources, first_row, memory.sums_in), sums)
        self._own_sums = sums[num_held - num_own :]
        returned = torch.empty(num_held - num_own, self._wire.width, dtype=self._wire.dtype, device="cpu")
        write_sums(sums[: num_held - num_own], self._wire, returned)
        bounds = np.zeros(len(sources) + 1, np.int64)
        bounds[memory.nodes[sources[:-1]] + 1] = num_rows[:-1]
        profile = self._call.profile
        profile.intranode_row_bytes += num_peer_rows * self._terms.sum_bytes
        profile.internode_row_bytes += returned.nbytes
        return Attachment(returned, bounds.cumsum() * self._wire.row_bytes)

    def finish(self, out: torch.Tensor) -> None:
        """Add the sums of other nodes, which are here, and write the result, (num_tokens, hidden)."""
        tokens, topology = self._plan.forwarding.node_to_tokens, self._memory.layout.topology
        returned = [
            (address, tokens[node].data_ptr(), len(tokens[node]))
            for node, address in zip(topology.remote_nodes(self._memory.rank), self._memory.attachments, strict=True)
        ]
        if self._wire.quantize is None:
            like = torch.empty(0, self._terms.hidden, dtype=self._wire.dtype, device="cpu")
            add_returned_sums(np.array(returned, np.int64), like, self._own_sums)
        else:
            for node, (address, _, _) in zip(topology.remote_nodes(self._memory.rank), returned, strict=True):
                add_quantized_rows(address, self._wire.quantize, tokens[node], self._own_sums)
        out.copy_(self._own_sums)
