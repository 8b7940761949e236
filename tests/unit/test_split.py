"""effllm/records/timeline.py: values computed by hand; communication is exposed while no computation runs.

All times are in ns.
"""

import random

from cases import cases

from effllm.records.timeline import KINDS, Split, device_kind, group_kind, host_kind, overlap_ns, split_iteration, union


@cases(
    ("iteration", "computing", "communicating", "expected"),
    [
        # Computation runs at 0-60 and communication at 50-80, which is 30 in total; 60-80 is exposed, 80-100 is idle.
        ((0, 100), [(0, 60)], [("dp", 50, 80)], Split(100, 30, 20, 60, 20, {"dp": (30, 20)})),
        # Computation on two streams at 0-40 and 20-50 takes 50 in total, and hides the communication at 10-45.
        ((0, 50), [(20, 50), (0, 40)], [("tp", 10, 45)], Split(50, 35, 0, 50, 0, {"tp": (35, 0)})),
        # dp at 10-30 and tp at 20-40 are 30 of communication in total; computation at 0-15 hides 5 of dp's 20.
        (
            (0, 40),
            [(0, 15)],
            [("dp", 10, 30), ("tp", 20, 40)],
            Split(40, 30, 25, 15, 0, {"dp": (20, 15), "tp": (20, 20)}),
        ),
        # Only 20-30 of the computation and 90-100 of the communication are inside of the iteration.
        ((20, 100), [(0, 30), (5, 15)], [("ep", 90, 130)], Split(80, 10, 10, 10, 60, {"ep": (10, 10)})),
        ((5, 25), [], [], Split(20, 0, 0, 0, 20, {})),  # without a record
        ((0, 10), [(3, 3), (7, 5)], [("pp", 4, 4)], Split(10, 0, 0, 0, 10, {})),  # ends that are not after starts
    ],
)
def test_communication_during_computation_is_not_exposed(iteration, computing, communicating, expected):
    assert split_iteration(*iteration, computing, communicating) == expected


@cases("seed", range(20))
def test_split_equals_a_count_of_nanoseconds_for_any_intervals(seed):
    draw = random.Random(seed)

    def intervals(count):
        return [(begin, begin + draw.randint(0, 40)) for begin in (draw.randint(-30, 220) for _ in range(count))]

    computing = intervals(draw.randint(0, 30))
    communicating = [(draw.choice(KINDS), begin, end) for begin, end in intervals(draw.randint(0, 30))]
    found = split_iteration(0, 200, computing, communicating)

    # The expected values come from a count of each nanosecond.
    busy = {moment for begin, end in computing for moment in range(max(begin, 0), min(end, 200))}
    moving = {moment for _, begin, end in communicating for moment in range(max(begin, 0), min(end, 200))}
    assert found[:5] == (200, len(moving), len(moving - busy), len(busy), 200 - len(moving | busy))
    assert found.exposed_ns + found.computing_ns + found.idle_ns == found.duration_ns
    assert all(exposed <= total <= found.communication_ns for total, exposed in found.kinds.values())


def test_touching_intervals_are_merged():
    assert union([(10, 20), (0, 10), (4, 6)]) == [(0, 20)]
    assert overlap_ns([(0, 10), (20, 30)], [(5, 25), (29, 40)]) == 5 + 5 + 1


def test_kernels_are_classified_by_name():
    assert device_kind("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "all_reduce"
    assert device_kind("ncclKernel_ReduceScatter_RING_LL_Sum_bf16") == "reduce_scatter"
    assert device_kind("ncclDevKernel_AllGather_RING_LL") == "all_gather"
    assert device_kind("ncclDevKernel_SendRecv") == "send_recv"
    assert device_kind("ncclDevKernel_Generic") == "other"
    assert device_kind("mscclKernel_Sum_half_LL") == "other"
    assert device_kind("void deep_ep::intranode::dispatch<8, 768>") == "other"
    assert device_kind("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64") == ""
    assert device_kind("Memcpy HtoD (Pinned -> Device)") == ""


def test_host_records_are_classified_by_name():
    assert host_kind("gloo:all_reduce") == "all_reduce"
    assert host_kind("gloo:_reduce_scatter_base") == "reduce_scatter"
    assert host_kind("aten::addmm") == ""
    assert host_kind("mkldnn::_linear_pointwise") == ""
    for name in (
        "c10d::allreduce_",
        "_c10d_functional::wait_tensor",
        "DistributedDataParallel.forward",
        "autograd::engine::evaluate_function: AddmmBackward0",
        "torch::autograd::AccumulateGrad",
        "_ReduceFromModelParallelRegionBackward",
        "Optimizer.step#AdamW.step",
    ):
        assert host_kind(name) is None, name


def test_groups_are_classified_by_name():
    expected = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tp",
        "DATA_PARALLEL_GROUP_WITH_CP": "dp",
        "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
        "CONTEXT_PARALLEL_GROUP": "cp",
        "EXPERT_MODEL_PARALLEL_GROUP": "ep",
        "EXPERT_DATA_PARALLEL_GROUP": "dp",
        "mesh_dp_shard": "dp",
        "mesh_tp": "tp",
        "default_pg": None,
    }

    assert {name: group_kind(name) for name in expected} == expected
    assert set(expected.values()) - {None} <= set(KINDS)
