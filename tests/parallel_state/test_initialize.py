"""Process groups without Megatron: real gloo ranks."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from ulysses_mc import parallel_state
from ulysses_mc.parallel_state import (
    ParallelConfig,
    ParallelConfigError,
    destroy_model_parallel,
    get_parallel_state,
    initialize_model_parallel,
)
from ulysses_mc.parallel_state.agreement import find_differences
from ulysses_mc.parallel_state.state import create_groups

SETTINGS = {
    8: [
        {"tensor_model_parallel_size": 2, "ulysses_parallel_size": 2},
        {"ulysses_parallel_size": 2, "ring_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"ulysses_parallel_size": 8},
        {
            "tensor_model_parallel_size": 2,
            "ulysses_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
        },
    ],
    4: [{"ulysses_parallel_size": 2, "order": "pp-dp-cp-tp-ep"}, {}],
    1: [{}],
}


def raises_for(settings, extra=()):
    """The error of this rank, when rank r is given settings[r]."""
    before = len(dist.distributed_c10d._world.pg_map)
    mine = settings[dist.get_rank()]
    with pytest.raises(ParallelConfigError) as raised:
        initialize_model_parallel(ParallelConfig(**mine), use_megatron=False, extra_groups=extra)
    assert len(dist.distributed_c10d._world.pg_map) == before  # before any group is made
    assert not parallel_state.model_parallel_is_initialized()
    return str(raised.value)


def test_differing_settings_are_named_on_every_rank():
    settings = [{"ulysses_parallel_size": 2}] * 3 + [
        {"ulysses_parallel_size": 4, "order": "ulysses-tp-dp-pp"}
    ]
    errors = run_ranks(4, raises_for, settings)
    assert len(set(errors)) == 1
    assert "ulysses_parallel_size: 2 on ranks 0-2, 4 on rank 3" in errors[0]
    assert "order: 'tp-ulysses-ring-ep-dp-pp' on ranks 0-2" in errors[0]
    assert "tensor_model_parallel_size" not in errors[0]


def test_sizes_that_do_not_multiply_on_every_rank():
    errors = run_ranks(4, raises_for, [{"ulysses_parallel_size": 3}] * 4)
    assert len(set(errors)) == 1
    assert "ulysses_parallel_size=3 leaves 1 of 4 ranks over" in errors[0]
    assert "3 or 6 ranks; ulysses_parallel_size=2 or 4" in errors[0]


def test_an_unknown_extra_group_on_every_rank():
    errors = run_ranks(2, raises_for, [{}] * 2, [("tp", "ulyses")])
    assert all("unknown axis 'ulyses'" in error for error in errors)


def only_some_come(absent):
    if dist.get_rank() == absent:
        time.sleep(4)
        return ""
    config = ParallelConfig(distributed_timeout_minutes=1 / 60)
    with pytest.raises(ParallelConfigError) as raised:
        initialize_model_parallel(config, use_megatron=False)
    return str(raised.value)


def test_a_rank_that_never_comes_is_named():
    errors = run_ranks(3, only_some_come, 2)
    assert errors[0] == errors[1]
    assert "After 1 s these have not come: rank 2" in errors[0]


def test_differences_of_thousands_of_ranks_are_short():
    answers = [{"a": "1", "b": "2"} for _ in range(4096)]
    answers[7], answers[9] = {"a": "1", "b": "3"}, {"a": "1", "b": "3"}
    assert find_differences(answers) == "b: 2 on ranks 0-6, 8, 10-4095, 3 on ranks 7, 9"
    assert find_differences(answers[:7]) == ""


def test_without_torch_distributed():
    with pytest.raises(ParallelConfigError, match="init_process_group"):
        initialize_model_parallel(ParallelConfig())
    with pytest.raises(ParallelConfigError, match="initialize_model_parallel"):
        get_parallel_state()


def destroy_and_start_again():
    seen = []
    for settings in SETTINGS[8] * 2:
        state = initialize_model_parallel(ParallelConfig(**settings), use_megatron=False)
        total = torch.ones(())
        dist.all_reduce(total, group=state.group("cp"))
        seen.append(int(total))
        destroy_model_parallel()
        destroy_model_parallel()  # nothing left: no error
        with pytest.raises(ParallelConfigError, match="destroyed"):
            state.group("tp")
        assert len(dist.distributed_c10d._world.pg_map) == 1
    return seen


def test_destroy_and_initialise_again_with_other_sizes():
    sizes = [ParallelConfig(**settings).context_parallel_size for settings in SETTINGS[8]] * 2
    assert run_ranks(8, destroy_and_start_again) == [sizes] * 8


def two_at_once():
    first = initialize_model_parallel(ParallelConfig(ulysses_parallel_size=2), use_megatron=False)
    second = initialize_model_parallel(
        ParallelConfig(ulysses_parallel_size=4), use_megatron=False, extra_groups=[("tp", "dp")]
    )
    assert get_parallel_state() is second
    totals = []
    for state in (first, second, first):
        total = torch.ones(())
        dist.all_reduce(total, group=state.group("ulysses"))
        totals.append(int(total))
    third = initialize_model_parallel(
        ParallelConfig(tensor_model_parallel_size=2), use_megatron=False
    )
    with pytest.raises(ParallelConfigError, match=r"extra_groups=\[\('tp', 'dp'\)\]"):
        third.group("tp", "dp")
    second.destroy()
    total = torch.ones(())
    dist.all_reduce(total, group=first.group("ulysses"))
    return [*totals, int(total)]


def test_two_states_at_once():
    assert run_ranks(4, two_at_once) == [[2, 4, 2, 2]] * 4


def groups_made_at_different_times() -> bool:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:

        def create_slowly(*arguments):
            made = create_groups(*arguments)
            time.sleep(0.2 * rank)
            store.set(f"made on {rank}", "")
            return made

        patch.setattr("ulysses_mc.parallel_state.initialize.create_groups", create_slowly)
        initialize_model_parallel(ParallelConfig(ulysses_parallel_size=2), use_megatron=False)
    return store.check([f"made on {r}" for r in range(dist.get_world_size())])


def test_no_rank_goes_on_before_all_have_their_groups():
    assert run_ranks(4, groups_made_at_different_times) == [True] * 4


def groups_that_are_not_alike() -> str:
    def create_one_more(*arguments):
        made, count = create_groups(*arguments)
        return made, count + (dist.get_rank() == 1)

    config = ParallelConfig(ulysses_parallel_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ulysses_mc.parallel_state.initialize.create_groups", create_one_more)
        with pytest.raises(ParallelConfigError) as raised:
            initialize_model_parallel(config, use_megatron=False)
    assert len(dist.distributed_c10d._world.pg_map) == 1
    assert not parallel_state.model_parallel_is_initialized()
    initialize_model_parallel(config, use_megatron=False)
    return str(raised.value)


def test_groups_that_are_not_alike_are_ended_on_every_rank():
    for error in run_ranks(4, groups_that_are_not_alike):
        assert "number of groups made: 9 on ranks 0, 2-3, 10 on rank 1" in error


def initialised_twice():
    for sizes in (2, 4):
        initialize_model_parallel(ParallelConfig(ulysses_parallel_size=sizes), use_megatron=False)
    text = repr(get_parallel_state())
    destroy_model_parallel()
    assert len(dist.distributed_c10d._world.pg_map) == 1
    assert not parallel_state.model_parallel_is_initialized()
    return text


def test_destroy_ends_the_groups_of_every_state_and_repr_is_one_line():
    for rank, text in enumerate(run_ranks(4, initialised_twice)):
        assert (
            text == f"<ParallelState of rank {rank} in 4: tp 1 x ulysses 4 x ring 1 x dp 1 x pp 1>"
        )


def timeouts():
    config = ParallelConfig(ulysses_parallel_size=2, distributed_timeout_minutes=2 / 60)
    state = initialize_model_parallel(config, use_megatron=False)
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(3.5)
        return 0.0
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(()), group=state.group("dp", "ulysses"))
    return time.monotonic() - start


def test_the_timeout_holds_for_the_groups():
    assert 1.5 < run_ranks(2, timeouts)[0] < 3.4


def getters():
    config = ParallelConfig(
        tensor_model_parallel_size=2,
        ulysses_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=3,
    )
    state = initialize_model_parallel(config, use_megatron=False)
    p = parallel_state
    pairs = {
        "tensor_model": "tp", "pipeline_model": "pp", "context": "cp", "ulysses": "ulysses",
        "ring": "ring", "expert_model": "ep", "expert_tensor": "etp", "expert_data": "edp",
        "data": "dp",
    }  # fmt: skip
    for name, axis in pairs.items():
        assert getattr(p, f"get_{name}_parallel_group")() is state.group(axis)
        assert getattr(p, f"get_{name}_parallel_rank")() == state.rank(axis)
        assert getattr(p, f"get_{name}_parallel_world_size")() == state.world_size(axis)
    assert p.get_data_parallel_group(with_context_parallel=True) is state.group("dp", "cp")
    assert p.get_data_parallel_world_size(with_context_parallel=True) == 2
    assert p.get_data_parallel_rank(with_context_parallel=True) == state.rank("ulysses")
    assert p.get_model_parallel_group() is state.group("tp", "pp")
    assert p.get_virtual_pipeline_model_parallel_world_size() == 3
    assert p.get_tensor_model_parallel_src_rank() == dist.get_rank() // 2 * 2
    assert p.get_pipeline_model_parallel_first_rank() == dist.get_rank() % 4
    assert p.get_pipeline_model_parallel_last_rank() == dist.get_rank() % 4 + 4
    assert p.get_pipeline_model_parallel_next_rank() == (dist.get_rank() + 4) % 8
    assert p.get_pipeline_model_parallel_prev_rank() == (dist.get_rank() + 4) % 8
    assert p.get_context_parallel_global_ranks() == list(state.ranks("ulysses"))
    assert "ulysses_mc" in state.describe() and "Megatron" not in state.describe()
    assert f"rank {dist.get_rank()}'s group" in state.describe()
    with pytest.raises(AttributeError, match="get_nothing"):
        p.get_nothing()


def test_getters_have_megatrons_names():
    run_ranks(8, getters)


def meshes():
    from torch.distributed.fsdp import fully_shard

    state = initialize_model_parallel(
        ParallelConfig(ulysses_parallel_size=2, order="ulysses-dp-tp-pp"), use_megatron=False
    )
    groups_before = len(dist.distributed_c10d._world.pg_map)
    flat, hybrid = state.mesh(("dp", "ulysses")), state.mesh("dp", "ulysses")
    assert flat.mesh.tolist() == [0, 1, 2, 3]
    assert flat.get_group() is state.group("dp", "ulysses")
    assert hybrid.mesh.tolist() == [[0, 1], [2, 3]]
    assert hybrid.mesh_dim_names == ("dp", "ulysses")
    assert hybrid["ulysses"].get_group() is state.group("ulysses")
    with pytest.raises(ParallelConfigError, match="one dimension"):
        state.mesh("dp", ("dp", "ulysses"))
    results = []
    for mesh in (flat, hybrid):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, bias=False)
        whole = model.weight.detach().clone()
        fully_shard(model, mesh=mesh)
        x = torch.full((1, 8), float(dist.get_rank()))
        model(x).sum().backward()
        gradient = model.weight.grad.full_tensor()
        assert torch.equal(model.weight.full_tensor(), whole)
        assert torch.allclose(gradient, torch.full((8, 8), 1.5))  # mean of the ranks
        results.append(model.weight.to_local().shape[0])
    assert len(dist.distributed_c10d._world.pg_map) == groups_before
    return results


def test_fsdp2_and_hsdp_run_on_the_same_groups():
    assert run_ranks(4, meshes, timeout=60) == [[2, 4]] * 4


def deepspeed_names():
    config = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
    mpu = initialize_model_parallel(config, use_megatron=False)
    assert not hasattr(mpu, "initialize_sequence_parallel")  # DeepSpeed then ignores the rest
    assert mpu.get_sequence_parallel_group() is mpu.group("ulysses")
    assert mpu.get_sequence_parallel_world_size() == 2
    assert mpu.get_sequence_data_parallel_group() is mpu.group("dp", "ulysses")
    assert mpu.get_sequence_data_parallel_world_size() == 4
    assert mpu.get_sequence_data_parallel_rank() == mpu.rank("dp", "ulysses")
    assert mpu.get_data_parallel_group() is mpu.group("dp", "ulysses")
    assert mpu.get_data_parallel_group_ranks() == list(mpu.ranks("dp", "ulysses"))
    assert mpu.get_data_parallel_world_size() == 2
    assert mpu.get_data_parallel_rank() == mpu.coordinates["dp"]
    assert mpu.get_model_parallel_world_size() == 2
    assert mpu.get_slice_parallel_group() is mpu.group("tp")
    assert mpu.get_pipe_parallel_world_size() == 1


def test_the_state_speaks_deepspeeds_names():
    run_ranks(8, deepspeed_names)
