"""``fusco bench host`` on a device that does nothing."""

import pytest

from fusco.bench.host.times import REST, STEPS, HostRun, measure_host, records_of

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 2), (2, 1)])
def test_pairs_are_timed_by_step(world, num_ranks, ranks_per_node):
    run = HostRun(
        device="null",
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        num_tokens=16,
        hidden=64,
        num_experts=8,
        num_topk=2,
        num_calls=20,
    )
    exact, static = records_of(run, world.run(measure_host, num_ranks, run))
    assert (exact.variant, static.variant) == ("exact", "static")
    for record in (exact, static):
        assert record.pair_us >= record.dispatch_us > 0 < record.combine_us
        assert record.dispatch_again_us > 0 < record.combine_all_us
        assert set(record.step_us) == {*STEPS, REST}
        launched = [step for step, us in record.step_us.items() if us]
        assert {"validate", "records", "allocate", "launch, wait for the plan"} <= set(launched)
        # Between nodes, too, all is prepared.
        assert not {"plan", "scatter", "launch kernels", "network"} & set(launched)
