"""NVIDIA's Python sources, out of wheels of the package index: fetched once into pytest's cache, never committed."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# TensorRT's version -> that of its bindings wheel. The first is TensorRT-LLM 1.2's.
BINDINGS = {"10.14.1": "10.14.1.48.post1", "10.15.1": "10.15.1.29", "10.16.1": "10.16.1.11", "11.4.0": "11.4.0.106"}
STUBS = "10.13.0.35.1"


def plugin_sources(version: str, cache: Path) -> Path:
    """The folder ``tensorrt/plugin`` of the bindings wheel of a TensorRT version."""
    return bindings(version, cache) / "tensorrt_bindings" / "plugin"


def bindings(version: str, cache: Path) -> Path:
    """The folder in which the package ``tensorrt_bindings`` of a TensorRT version is."""
    return _unpacked(f"tensorrt-cu13-bindings=={BINDINGS[version]}", cache)


def type_stubs(cache: Path) -> Path:
    """The folder in which the type stubs ``tensorrt`` and ``tensorrt_bindings`` are."""
    return _unpacked(f"tensorrt-stubs=={STUBS}", cache)


def _unpacked(requirement: str, cache: Path) -> Path:
    folder = cache / requirement
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, requirement]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                raise RuntimeError(
                    f"{requirement} cannot be downloaded, and these tests run NVIDIA's own sources out of it "
                    f"(give pip an index):\n{result.stderr}"
                )
            (wheel,) = Path(scratch).glob("*.whl")
            unpacked = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.exists():  # else another test process was faster
                    raise
    return folder
