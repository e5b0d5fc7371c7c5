"""``scatter_slices``: rows go to all their slots as far as flags announce them, and each is read once."""

import numpy as np
import torch

from fusco.cpu.kernels.scatter_slices import SourceRows, scatter_slices

NUM_ROWS, ROW_BYTES = (3, 0, 4), 6
PAIR_TO_SLOT = torch.tensor([4, 1, 0, 2, 3])  # rows 0 and 6 have two pairs, row 3 has one, the others none
ROW_TO_FIRST_PAIR = torch.tensor([0, 2, 2, 2, 3, 3, 3, 5])


class Sources:
    """Sources 0 and 1 of this node, announced at once; source 2 of another node, announced two rows at a time."""

    def __init__(self):
        self.pools = [torch.arange(n * ROW_BYTES, dtype=torch.uint8) + 100 * i for i, n in enumerate(NUM_ROWS)]
        self.flags = np.array([6, 6, 7 << 32])
        first_row = [0, 3, 3]
        self.rows = np.array(
            [
                SourceRows(
                    flag=self.flags[i:].ctypes.data,
                    before=6 if i < 2 else 7 << 32,
                    rows_per_step=NUM_ROWS[i] if i < 2 else 2,
                    pool=self.pools[i].data_ptr(),
                    first_row=first_row[i],
                    num_rows=NUM_ROWS[i],
                    is_of_peer=i > 0,
                )
                for i in range(3)
            ],
            np.int64,
        )
        self.num_done = np.zeros(3, np.int64)
        # Two payloads: the first two bytes of a row, and the last four.
        self.outputs = [torch.zeros(5, 2, dtype=torch.uint8), torch.zeros(5, 4, dtype=torch.uint8)]
        self.places = np.array(
            [[out.data_ptr(), out.shape[1], at] for out, at in zip(self.outputs, (0, 2), strict=True)]
        )

    def scatter(self, rows_per_slice=2):
        tables = PAIR_TO_SLOT, ROW_TO_FIRST_PAIR
        return scatter_slices(self.rows, self.num_done, *tables, self.places, ROW_BYTES, rows_per_slice)

    def filled(self):
        return torch.cat(self.outputs, dim=1)


def test_nothing_before_the_flags():
    sources = Sources()
    assert sources.scatter() == (0, 0, 2)
    assert not sources.filled().any()


def test_rows_follow_the_flags_slice_by_slice():
    sources = Sources()
    sources.flags[0] = 7
    assert sources.scatter() == (2, 0, 2)  # a slice
    assert sources.scatter() == (1, 0, 1)
    assert sources.filled()[[4, 1]].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    sources.flags[2] += 1
    assert sources.scatter() == (2, 1, 1)  # one of these two rows is needed here
    assert sources.scatter() == (0, 0, 1)
    sources.flags[2] += 1
    assert sources.scatter() == (2, 1, 0)
    assert sources.filled()[0].tolist() == list(range(200, 206))
    assert sources.filled()[[2, 3]].tolist() == [list(range(218, 224))] * 2


def test_all_sources_in_one_call_if_they_are_small():
    sources = Sources()
    sources.flags[:] = 7, 7, (7 << 32) + 2
    assert sources.scatter(rows_per_slice=100) == (7, 2, 0)
    assert sources.num_done.tolist() == list(NUM_ROWS)
