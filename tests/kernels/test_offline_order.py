import pytest

from tests.kernels._offline_order import order_faults

FETCH, WAIT, DOT = "cp.async.bulk.prefetch.L2.global [a], b;", "griddepcontrol.wait;", "wgmma.mma_async.sync.aligned x;"
FIRST, SUMS, SYNC = "ld.global.b32 c;", "st.global.v4.b32 d;", "bar.sync 0;"
COUNT, READ = "atom.global.gpu.acq_rel.add.u32 e;", "ld.global.cg.v4.b32 f;"
CHAIN = [FETCH, FETCH, WAIT, FIRST, DOT, SUMS, SYNC, COUNT, SYNC, READ, SUMS]


@pytest.mark.parametrize(
    "change,said",
    [
        ({}, None),
        ({0: ""}, "1 fetches before the wait, of 2 constants"),
        ({1: WAIT, 2: FETCH}, "a fetch after the wait"),
        ({0: FIRST}, "ld.global.b32 before the wait"),
        ({1: "cp.async.cg.shared.global g;"}, "cp.async.cg.shared.global before the wait"),
        ({0: "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier h;"}, "before the wait"),
        ({0: "griddepcontrol.launch_dependents;"}, "griddepcontrol.launch_dependents before the wait"),
        ({2: ""}, "0 waits for the kernel before"),
        ({3: ""}, "what the sums start from is read after the product"),
        ({6: ""}, "no barrier between the sums' stores and the count"),
        ({7: "atom.global.gpu.relaxed.add.u32 e;"}, "need not be seen behind it"),
        ({7: "atom.global.cta.acq_rel.add.u32 e;"}, "need not be seen behind it"),
        ({7: ""}, "0 counts"),
        ({8: ""}, "no barrier between the count and what it allows"),
        ({9: FIRST}, "ld.global.b32 behind the count may come from a multiprocessor's own cache"),
    ],
)  # fmt: skip
def test_an_order_that_races_is_found(change: dict[int, str], said: str | None) -> None:
    arguments = dict.fromkeys(("ahead_ptr", "b_ptr", "partials_ptr", "counters_ptr"), "given")
    ptx = "\n".join(change.get(i, line) for i, line in enumerate(CHAIN))
    found = list(order_faults(ptx, arguments, True))
    assert found == [] if said is None else any(said in fault for fault in found), found
    if said is None:
        alone = list(order_faults(ptx, {**arguments, "ahead_ptr": None}, False))
        assert alone == ["not chained, and yet it waits or fetches"]
