"""Random valid, invalid, cancelled and stopped requests at a real Triton server: no wrong answer, stuck slot or leak.

Answers are compared with those that the Python API gives to each request alone. Resident memory of the model's process
and of the server is read twice a second; after a warm-up of the first third it is flat if the medians of the second and
of the last third differ by at most 2 %. Needs the tests' server: `make .venv/.triton`.
"""

import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from triton_server.environment import PACKAGES

sys.path.append(str(PACKAGES))  # tritonclient, behind the NumPy of this process

from triton_server.client import GrpcStream, RefusedError, grpc_answers, http_answers
from triton_server.mixed_requests import (
    MALFORMED,
    PROMPTS,
    STOP,
    check_answer,
    model_inputs,
    random_settings,
    sampling_params,
)
from triton_server.server import Server

from ddtree.runtime import LLM, RequestOutput
from ddtree.runtime.engine_cache import cached_engine, demo_pair
from ddtree.runtime.triton_repository import write_repository

SETTINGS: dict[str, Any] = {
    "adaptive": False,
    "budget": 8,
    "threads": 1,
}  # the same passes whatever the machine's speed
LONG = {"max_tokens": 1000, "temperature": 1.5, "ignore_eos": True}
GROWTH = 0.02  # of resident memory, at most
SAMPLE_SECONDS = 0.5


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, failure: str | None = None) -> None:
        with self.lock:
            self.counts[kind] += 1
            if failure is not None:
                self.failures.append(f"{kind}: {failure}")


Expected = list[tuple[str, dict[str, Any], RequestOutput]]


def expected_answers(llm: LLM, count: int, seed: int) -> Expected:
    """Random requests and what the Python API gives to each alone."""
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt, settings = draw.choice(PROMPTS), random_settings(draw) | {"seed": draw.getrandbits(64)}
        requests.append((prompt, settings, llm.generate(prompt, sampling_params(settings))))
    return requests


def client(server: Server, expected: Expected, seed: int, deadline: float, tally: Tally) -> None:
    """Send requests one after another until the deadline."""
    draw = random.Random(seed)
    actions = [(valid, 70), (invalid, 15), (cancelled, 10), (stopped, 5)]
    while server.process.poll() is None and time.monotonic() < deadline:
        (action,) = draw.choices([action for action, _ in actions], [weight for _, weight in actions])
        try:
            action(server, expected, draw)
            tally.add(action.__name__)
        except Exception as error:
            tally.add(action.__name__, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def valid(server: Server, expected: Expected, draw: random.Random) -> None:
    """A request whose answer has to be the one that it gets alone."""
    prompt, settings, output = draw.choice(expected)
    ask = draw.choice([http_answers, grpc_answers])
    check_answer(ask(server, model_inputs(prompt, settings, streaming=draw.random() < 0.5)), output)


def invalid(server: Server, expected: Expected, draw: random.Random) -> None:
    """A request that has to be refused with its reason."""
    inputs, message = draw.choice(MALFORMED)
    try:
        http_answers(server, inputs)
    except RefusedError as error:
        if message not in str(error):
            raise AssertionError(f"{error}, expected {message}") from None
    else:
        raise AssertionError(f"accepted: {inputs}")


def cancelled(server: Server, expected: Expected, draw: random.Random) -> None:
    """A request that its client gives up after some responses."""
    with GrpcStream(server, model_inputs(draw.choice(PROMPTS), LONG, streaming=True)) as stream:
        for _ in zip(range(draw.randint(0, 6)), stream, strict=False):
            pass


def stopped(server: Server, expected: Expected, draw: random.Random) -> None:
    """A request that another one stops by its id."""
    name = f"{draw.getrandbits(64):x}"
    with GrpcStream(server, model_inputs(draw.choice(PROMPTS), LONG, streaming=True), request_id=name) as stream:
        responses = iter(stream)
        next(responses)
        with contextlib.suppress(RefusedError):  # how a stop is answered
            grpc_answers(server, STOP, request_id=name)
        assert list(responses)[-1]["finish_reason"] == ["cancelled"]


def resident_megabytes(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def watch(pids: dict[str, int], deadline: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in pids}
    while time.monotonic() < deadline:
        for name, pid in pids.items():
            if Path(f"/proc/{pid}/status").exists():
                samples[name].append(resident_megabytes(pid))
        time.sleep(SAMPLE_SECONDS)
    return samples


def slots_that_run_at_once(server: Server, slots: int) -> int:
    """Send as many requests as there are slots at once, and count how many ran together."""
    settings = {"max_tokens": 200, "temperature": 1.5, "ignore_eos": True}
    inputs = model_inputs(PROMPTS[0], settings)
    with ThreadPoolExecutor(slots) as pool:
        answers = [answer for (answer,) in pool.map(lambda _: http_answers(server, inputs), range(slots))]
    first_end = min(answer["last_token_time_ns"] for answer in answers)
    return sum(answer["first_scheduled_time_ns"] < first_end for answer in answers)


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.FloatRange(10, 540), default=180, help="Of load.")
@click.option("--clients", default=12, help="That send requests at once.")
@click.option("--requests", default=200, help="Different valid ones.")
@click.option("--seed", default=0, help="Of the requests.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(seconds: float, clients: int, requests: int, seed: int, path: Path | None) -> None:
    """Soak the server, and end with 1 if anything is wrong."""
    engine = cached_engine(*demo_pair())
    with LLM(engine, **SETTINGS) as llm:
        expected = expected_answers(llm, requests, seed)
        slots = llm.manifest.limits.max_batch_size
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        write_repository(engine, Path(folder) / "repository", SETTINGS)
        with Server(Path(folder) / "repository", Path(folder) / "log") as server:
            assert server.process is not None
            pids = {"model": server.backend_pid(), "server": server.process.pid}
            deadline = time.monotonic() + seconds
            with ThreadPoolExecutor(clients + 1) as pool:
                memory = pool.submit(watch, pids, deadline)
                for index in range(clients):
                    pool.submit(client, server, expected, seed + 1 + index, deadline, tally)
            died = server.process.poll() is not None
            if died:
                tally.failures.append(f"the server ended by itself:\n{server.tail()}")
            free = 0 if died else slots_that_run_at_once(server, slots)
            exit_code = server.stop()

    figures: dict[str, Any] = {"seconds": seconds, "clients": clients, "slots": slots, "exit code": exit_code}
    figures |= {f"{kind} requests": count for kind, count in sorted(tally.counts.items())}
    figures |= {"wrong answers and failures": len(tally.failures), "slots free at the end": free}
    flat = True
    for name, samples in memory.result().items():
        third = len(samples) // 3
        early, late = statistics.median(samples[third : 2 * third]), statistics.median(samples[2 * third :])
        figures |= {f"{name}: MB, second third": round(early, 1), f"{name}: MB, last third": round(late, 1)}
        flat = flat and late <= early * (1 + GROWTH)
    figures["memory flat"] = flat
    table = Table("", "", box=MARKDOWN)
    for name, figure in figures.items():
        table.add_row(name, str(figure))
    Console(width=120).print(table)
    for failure in tally.failures[-20:]:
        click.echo(failure, err=True)
    if path is not None:
        path.write_text(json.dumps(figures | {"failures": tally.failures, "memory": memory.result()}, indent=1))
    sys.exit(0 if not tally.failures and flat and free == slots and exit_code == 0 else 1)


if __name__ == "__main__":
    main()
