"""Kill a rank under load: when all are told, what is said, who is left over, how long until a new engine answers.

python benchmarks/parallel/kill_rank.py llama-3-8b [--size 2] [--stages 1] [--victim 1] [--freeze] [-o KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import yaml

from headrace.config import EngineConfig
from headrace.engine.async_llm import ENGINE_CORE, AsyncLLM
from headrace.engine.messages import CoreSpec
from headrace.engine.process_client import ProcessClient
from headrace.errors import EngineDeadError
from headrace.sampling_params import SamplingParams

SHAPES = Path(__file__).parent.parent / "data" / "models"


def children_of(pid: int) -> list[int]:
    """Living processes that ``pid`` started, in order."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ranks_of(core: int) -> list[int]:
    """The core's ranks, in order: the processes that run the rank program."""
    return [pid for pid in children_of(core) if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def answer(llm: AsyncLLM, name: str, num_tokens: int) -> int:
    count = 0
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async for output in llm.generate({"prompt_token_ids": list(range(5, 105))}, params, name):
        count = len(output.outputs[0].token_ids)
    return count


async def start(config: EngineConfig) -> tuple[AsyncLLM, ProcessClient]:
    begun = time.perf_counter()
    client = ProcessClient(CoreSpec(ENGINE_CORE, config))
    llm = AsyncLLM(config, client)
    await answer(llm, "first", 4)
    print(f"first answer after {time.perf_counter() - begun:.1f} s", flush=True)
    return llm, client


async def strike(config: EngineConfig, args: argparse.Namespace) -> None:
    llm, client = await start(config)
    core, ranks = client.pid, ranks_of(client.pid)
    names = [f"r{number}" for number in range(args.requests)]
    requests = [asyncio.create_task(answer(llm, name, args.tokens)) for name in names]
    await asyncio.sleep(args.after)
    struck = time.perf_counter()
    os.kill(ranks[args.victim], signal.SIGSTOP if args.freeze else signal.SIGKILL)
    results = await asyncio.gather(*requests, return_exceptions=True)
    told = time.perf_counter() - struck
    print(f"all {len(results)} requests told after {told:.2f} s: {results[0]}")
    assert all(isinstance(result, EngineDeadError) for result in results), results
    await llm.shutdown()
    await asyncio.sleep(1)
    left = [pid for pid in [core, *ranks] if is_alive(pid)]
    print(f"processes left over: {left}")
    again, _ = await start(config)
    await again.shutdown()
    assert told < 10 and not left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--freeze", action="store_true", help="stop it instead of killing it")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer; it must not end before")
    parser.add_argument("--after", type=float, default=1.5, help="seconds of load before")
    parser.add_argument("-o", "--option", action="append", default=[])
    args = parser.parse_args()
    folder = SHAPES / args.model
    options: dict[str, Any] = {
        "model": str(folder) if folder.is_dir() else args.model,
        "load_format": "dummy" if folder.is_dir() else "auto",
        "max_model_len": 4096,
        "skip_tokenizer_init": True,
        "device": args.device,
        "tensor_parallel_size": args.size,
        "pipeline_parallel_size": args.stages,
        **{key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.option)},
    }
    asyncio.run(strike(EngineConfig.from_options(**options), args))


if __name__ == "__main__":
    main()
