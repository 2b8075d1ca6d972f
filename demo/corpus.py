"""The text: this interpreter's standard library and the generator's documents, split by file and by seed."""

import random
import sysconfig
from pathlib import Path

from ddtree.demo.generator import FIRST_HELD_OUT_SEED, GENERATED_KINDS, generate

KINDS = ("stdlib", *GENERATED_KINDS)

# Whole files that no training step sees. All of them exist in Python 3.11 and later.
HELD_OUT_FILES = (
    "calendar.py",
    "configparser.py",
    "csv.py",
    "graphlib.py",
    "heapq.py",
    "http/cookies.py",
    "json/decoder.py",
    "queue.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
    "zipapp.py",
)

# Tests, other people's packages, tables rather than programs, and a file that holds the paths of one machine.
_LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__")


def training_files() -> list[tuple[str, Path]]:
    """(name, path) of each file of the standard library to train on, sorted by name ("json/encoder.py")."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [(path.relative_to(root), path) for path in root.rglob("*.py")]
    return sorted(
        (name.as_posix(), path)
        for name, path in found
        if name.as_posix() not in HELD_OUT_FILES
        and not set(name.parts) & set(_LEFT_OUT)
        and not name.name.startswith("_sysconfigdata")
    )


def held_out_files() -> list[tuple[str, Path]]:
    """(name, path) of each of HELD_OUT_FILES that this Python has in source form."""
    root = Path(sysconfig.get_path("stdlib"))
    return [(name, root / name) for name in HELD_OUT_FILES if (root / name).is_file()]


def stdlib_texts(*, held_out: bool) -> list[str]:
    """The text of each held-out file, or of each training file."""
    files = held_out_files() if held_out else training_files()
    return [path.read_text(encoding="utf-8", errors="replace") for _, path in files]


def generated_texts(count: int, *, held_out: bool, seed: int = 0) -> list[str]:
    """`count` documents of each generated kind, in random order. Held-out documents come from other seeds."""
    first = FIRST_HELD_OUT_SEED if held_out else 0
    texts = [generate(kind, first + number) for kind in GENERATED_KINDS for number in range(count)]
    random.Random(seed).shuffle(texts)
    return texts
