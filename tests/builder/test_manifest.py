"""Reading an engine directory: what is missing, cut, changed or of another version is named in one line."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree.builder import FORMAT_VERSION, BuildError, Manifest, is_engine
from ddtree.builder.manifest import CompiledInfo

from .models import CASES, make_pair


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("built"), CASES[0]).directory


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy of an engine directory, to damage."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


def edit(engine: Path, change: Callable[[dict], object]) -> None:
    content = json.loads((engine / "config.json").read_text())
    change(content)
    (engine / "config.json").write_text(json.dumps(content))


def refused(engine: Path, read: Callable[[Path], Manifest] = Manifest.load) -> str:
    with pytest.raises(BuildError) as caught:
        read(engine)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(")")
    return message


def test_a_manifest_is_plain_json_and_comes_back_equal(engine: Path) -> None:
    manifest = Manifest.load(engine)
    (engine / "config.json").unlink()
    manifest.save(engine)
    assert Manifest.load(str(engine)) == manifest
    assert json.loads((engine / "config.json").read_text())["format_version"] == FORMAT_VERSION


def test_a_manifest_cannot_be_changed(engine: Path) -> None:
    manifest = Manifest.load(engine)
    for part in (manifest, manifest.limits, manifest.target, manifest.draft, manifest.files[0]):
        name = dataclasses.fields(part)[0].name  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"model_type": "qwen3"}'])
def test_what_is_no_engine(tmp_path: Path, content: str | None) -> None:
    assert not is_engine(tmp_path / "nowhere")
    assert "nowhere is not an engine directory" in refused(tmp_path / "nowhere")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert not is_engine(tmp_path)
    assert "ddtree build" in refused(tmp_path)


def test_another_format_version(engine: Path) -> None:
    edit(engine, lambda content: content.update(format_version=FORMAT_VERSION + 1))
    assert is_engine(engine)
    newer = (
        f"has format version {FORMAT_VERSION + 1}, this ddtree reads {FORMAT_VERSION} (upgrade ddtree-trtllm, or build"
    )
    assert newer in refused(engine)
    edit(engine, lambda content: content.update(format_version=FORMAT_VERSION - 1))
    assert f"has format version {FORMAT_VERSION - 1}, this ddtree reads {FORMAT_VERSION} (build" in refused(engine)
    edit(engine, lambda content: content.update(format_version="two"))
    assert "has format version two" in refused(engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("limits"),
        lambda content: content.update(limits=None),
        lambda content: content.update(surprise=1),
        lambda content: content["target"].pop("vocab_size"),
        lambda content: content["draft"].update(surprise=1),
        lambda content: content.pop("compiled"),
        lambda content: content.update(compiled={"arch": "sm_120"}),
        lambda content: content.update(files=3),
        lambda content: content.update(files=[{}]),
    ],
)
def test_a_damaged_manifest(engine: Path, change: Callable[[dict], object]) -> None:
    edit(engine, change)
    assert "config.json is damaged" in refused(engine)


def test_files_that_are_missing_or_cut(engine: Path) -> None:
    for file in Manifest.load(engine).files:
        path = engine / file.name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert f"{file.name} has {file.size - 1} bytes, not {file.size}" in refused(engine)
        path.unlink()
        assert f"{file.name} is missing" in refused(engine)
        path.write_bytes(content)
    Manifest.verify(engine)


def test_a_changed_file_is_found_by_its_hash_alone(engine: Path) -> None:
    path = engine / "target.float32.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    Manifest.load(engine)
    (built,) = (file for file in Manifest.load(engine).files if file.name == path.name)
    found = hashlib.sha256(content).hexdigest()
    assert (
        f"target.float32.safetensors has changed since the engine was built: its SHA-256 is {found[:16]}..., "
        f"not {built.sha256[:16]}... (build"
    ) in refused(engine, Manifest.verify)


def test_a_compiled_engines_manifest_comes_back_equal(engine: Path) -> None:
    compiled = CompiledInfo(
        "sm_120", "tensorrt_rtx 1.7 only", "GPUs of compute capability 12.0", "kernel", 256, 2560, None
    )
    manifest = dataclasses.replace(Manifest.load(engine), compiled=compiled)
    manifest.save(engine)
    assert Manifest.load(engine) == manifest
