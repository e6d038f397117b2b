"""Engines that share a GPU start one after the other."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.config import ModelArgs
from serve_app.model.gpu_turn import gpu_turn

HOLD = """
import asyncio, pathlib, sys
from serve_app.model.gpu_turn import gpu_turn
async def main():
    async with gpu_turn(sys.argv[1], pathlib.Path(sys.argv[2])):
        print("held", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_one_after_the_other_on_one_gpu_only(tmp_path: Path) -> None:
    """The second start on GPU 0 begins when the first is over; one on GPU 1 does not wait."""
    order: list[str] = []
    begun = asyncio.Event()

    async def start(name: str, gpu: str) -> None:
        async with gpu_turn(gpu, tmp_path):
            order.append(f"{name} begins")
            begun.set()
            await asyncio.sleep(0.5)
            order.append(f"{name} ends")

    first = asyncio.create_task(start("first", "0"))
    await begun.wait()
    await asyncio.gather(first, start("second", "0"), start("other", "1"))
    assert order[:2] == ["first begins", "other begins"]
    assert order.index("second begins") > order.index("first ends")


async def test_a_holder_that_dies_lets_go(tmp_path: Path) -> None:
    """Killed in the middle of its start: the next one goes on."""
    command = [sys.executable, "-c", HOLD, "0", str(tmp_path)]
    holder = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), gpu_turn("0", tmp_path):
            pass
    holder.kill()
    async with asyncio.timeout(10), gpu_turn("0", tmp_path):
        pass
    await holder.wait()


@pytest.mark.parametrize(("gpus", "shares"), [(0.5, True), (1, False), (0, False)])
def test_only_who_shares_waits(gpus: float, shares: bool) -> None:
    """A whole GPU and no GPU need no turn."""
    args = ModelArgs.model_validate({"source": {"fake": {}}, "resources": {"num_gpus": gpus}})
    assert args.resources.shares_a_gpu is shares
