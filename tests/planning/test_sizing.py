"""sizing: from memory to GPUs of a size."""

from dataclasses import replace

import pytest

from serve_app.config import ModelArgs
from serve_app.planning.fleet import Unit, fleet
from serve_app.planning.memory import ReplicaMemory
from serve_app.planning.nodes import GIB
from serve_app.planning.sizing import ModelMemory, least_bytes, too_small_cache, want
from tests.planning.fleets import model

# 8 GiB of weights, 1 GiB working, 1 GiB for a sequence: 10 GiB at 0.5 of the GPU.
MEMORY = ReplicaMemory(0.5, 8 * GIB, GIB, GIB / 1024, 1024, 16)


def same(memory: ReplicaMemory) -> ModelMemory:
    """On every GPU."""
    return ModelMemory({None: memory})


def unit(**args: object) -> Unit:
    return fleet({"applications": [model("m", **args)]})[0]


def test_the_smallest_gpu_holds_weights_working_memory_and_one_sequence() -> None:
    """To a MiB: on it one full sequence fits, a MiB less and it does not."""
    size = least_bytes(MEMORY)
    assert size == pytest.approx(20 * GIB, abs=2 << 20)
    assert MEMORY.full_sequences(size) >= 1 > MEMORY.full_sequences(size - (1 << 20))


def test_a_gpu_model_needs_gpus_of_that_size() -> None:
    """And says of what it is made."""
    wanted = want(unit(), same(MEMORY))
    assert wanted.gpu_bytes == least_bytes(MEMORY)
    assert (
        wanted.of_what == "weights 8 GiB, working 1 GiB, one sequence of 1,024 tokens 1 GiB; the engine fills 0.5 of it"
    )
    assert want(unit(), None).gpu_bytes == 0


def test_a_cache_of_a_given_size_must_fit_into_the_share() -> None:
    """vLLM bounds it by the whole GPU; the other models on it count on their shares."""
    memory = replace(MEMORY, kv_bytes=2 * GIB)
    assert want(unit(), same(memory)).gpu_bytes == pytest.approx(11 * GIB, abs=2 << 20)
    assert want(unit(resources={"num_gpus": 0.25}), same(memory)).gpu_bytes == 44 * GIB


def test_a_cache_that_holds_no_sequence_fits_nowhere() -> None:
    """However large the GPU; the message says what to change."""
    memory = replace(MEMORY, kv_bytes=GIB // 2)
    assert "holds 512 tokens: fewer than one sequence of 1,024" in too_small_cache(memory)
    assert too_small_cache(replace(MEMORY, kv_bytes=GIB)) == ""
    assert too_small_cache(MEMORY) == ""


def test_the_cpu_engine_takes_the_machines_memory() -> None:
    """Each of its workers: what it holds, or holds at the least where its cache has no size of its own."""
    cpu = unit(resources={"num_gpus": 0}, tensor_parallel_size=2)
    assert want(cpu, same(replace(MEMORY, kv_bytes=3 * GIB))).ram_bytes == 2 * 12 * GIB
    assert want(cpu, same(MEMORY)).ram_bytes == 2 * 10 * GIB


def test_memory_that_depends_on_the_size_of_the_gpu() -> None:
    """vLLM takes larger steps on larger GPUs: the model that fits a small one may need more on a large one."""

    def sizer(args: ModelArgs, size: int | None) -> ReplicaMemory:
        return replace(MEMORY, working=(20 if size == 80 * GIB else 1) * GIB)

    args = ModelArgs.model_validate({"source": {"hub": "a/b"}})
    near = pytest.approx(20 * GIB, abs=2 << 20)
    assert ModelMemory.of(sizer, args, [24 * GIB, 80 * GIB]).least_gpu()[0] == near
    assert ModelMemory.of(sizer, args, [16 * GIB, 80 * GIB]).least_gpu()[0] == pytest.approx(58 * GIB, abs=2 << 20)
    # Too small for 16 and for 18: what is needed is more than the largest that there is.
    assert ModelMemory.of(sizer, args, [16 * GIB, 18 * GIB]).least_gpu()[0] == near
    assert ModelMemory.of(sizer, args, []).least_gpu()[0] == near
    assert ModelMemory.of(sizer, args, [80 * GIB]).on(80 * GIB).working == 20 * GIB
