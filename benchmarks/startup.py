"""Seconds from starting `ddtree generate` to the first character it writes, with the engine in the cache and without.

The prompt is given as an argument, so the first character on standard output is the model's.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import click
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

COMMAND = [sys.executable, "-c", "from ddtree.runtime.cli import main; main()", "generate", "Once there was"]


def seconds_to_first_text(cache: str) -> float:
    """Run the command once with this engine cache."""
    environment = os.environ | {"DDTREE_CACHE": cache}
    start = time.perf_counter()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    return seconds


@click.command(context_settings={"show_default": True})
@click.option("--runs", default=5, help="Runs of each kind.")
def main(runs: int) -> None:
    """Measure the start-up of the command with the demo pair."""
    built, cached = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            built.append(seconds_to_first_text(cache))
            cached.append(seconds_to_first_text(cache))
    table = Table("engine", "median seconds", "slowest", box=MARKDOWN)
    for name, seconds in (("built in this run", built), ("in the cache", cached)):
        table.add_row(name, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
