"""Memory that repeated calls keep stays within the hint, whatever shapes there were."""

from unittest import mock

import torch

from fusco.cuda.kernels.plan import PlanMemory, PlanShape
from fusco.cuda.kernels.plan_forwarding import ForwardingMemory
from fusco.cuda.kernels.spares import MAX_SPARE_BYTES, SpareLimit

CPU = torch.device("cpu")


def memories(num_rows: int, limit: SpareLimit) -> tuple[PlanMemory, ForwardingMemory]:
    shape = PlanShape(num_rows, num_rows, 8, 4, torch.float32)
    return PlanMemory(shape, CPU, limit), ForwardingMemory(CPU, (2, num_rows), limit)


def test_spare_plans_have_one_limit_and_those_of_recent_shapes_stay():
    limit = SpareLimit()
    # Of many sizes: sixteen together, two together, and some alone, of which none is spare.
    all_memories = [each for num_rows in range(1, 4000, 10) for each in memories(num_rows, limit)]
    for memory in all_memories:
        memory.take()
    spare = {t.memory.untyped_storage().data_ptr(): t.memory.untyped_storage() for m in all_memories for t in m._spare}
    num_bytes = sum(storage.nbytes() for storage in spare.values())
    assert MAX_SPARE_BYTES // 8 < num_bytes <= MAX_SPARE_BYTES
    small, _ = memories(5, limit)
    assert small.take().memory is small.take().memory  # of one allocation
    first = all_memories[0]
    assert not first._spare
    assert first.take().shape.num_rows == 1


def test_shapes_without_spare_plans_take_no_place_of_those_with_some():
    limit = SpareLimit()
    small, _ = memories(5, limit)
    small.take()
    for num_rows in range(5000, 5100):  # of which each plan is allocated alone
        large, _ = memories(num_rows, limit)
        large.take()
        assert not large._spare
    assert small._spare


def test_refilling_allocates_only_several_plans_and_only_if_none_is_left():
    limit = SpareLimit()
    small, _ = memories(5, limit)
    large, _ = memories(5000, limit)
    for memory in (small, large):
        memory.refill()  # of a shape that was never used
        assert not memory._spare
        memory.take()
    num_spare = len(small._spare)
    for num_left in (num_spare, 0):
        del small._spare[num_left:]
        with mock.patch.object(PlanMemory, "_allocate", side_effect=torch.OutOfMemoryError) as allocate:
            small.refill()  # without memory, so the next call looks for it
        assert allocate.call_count == (not num_left)
        assert len(small._spare) == num_left
    for memory in (small, large):
        memory.refill()
    assert (len(small._spare), large._spare) == (num_spare + 1, [])
