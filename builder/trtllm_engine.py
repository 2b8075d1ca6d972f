"""The engines that ``trtllm-build`` leaves behind, put together to an engine directory."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .build import DRAFT_PLAN, DRAFT_TO_TARGET, TARGET_PLAN, TOKENIZER_FILES, describe_draft, describe_target
from .errors import BuildError
from .manifest import FORMAT_VERSION, CompiledInfo, FileInfo, Limits, Manifest
from .staging import check_output, reason, staged
from .trtllm_checkpoint import engine_directory, read_configs

PLANS = {"target": TARGET_PLAN, "draft": DRAFT_PLAN}
NOTE = "these engines leave the KV caches as they are: write the outputs update.* at write_index"


def collect_engines(checkpoints: Path, output: Path, *, force: bool = False) -> Manifest:
    """Make an engine directory of what trtllm-build made.

    Args:
        checkpoints: what ``convert_checkpoints`` wrote, with trtllm-build's output in ``target-engine`` and
            ``draft-engine``.
        output: the engine directory; must not exist, or be empty, or be an engine with ``force``.

    Raises:
        BuildError: an engine is missing, is not of our models, or does not go with the other.
        BusyError: another process writes ``output``.
    """
    checkpoints, output = Path(checkpoints), Path(output).absolute()
    check_output(output, force)
    roles = [role for role in PLANS if (checkpoints / role).is_dir()]
    if "target" not in roles:
        raise BuildError(f"{checkpoints} has no checkpoint of a target (make one with ddtree convert)")
    described = {role: _read_engine(engine_directory(checkpoints, role)) for role in roles}
    section, dtype = described["target"]
    if "draft" in roles:
        _check_pair(section, described["draft"][0])
    built = section["engine"]
    target, draft = read_configs(checkpoints, section)
    try:
        with staged(output, force) as directory:
            for role in roles:
                shutil.copyfile(engine_directory(checkpoints, role) / "rank0.engine", directory / PLANS[role])
            if (checkpoints / "draft" / DRAFT_TO_TARGET).is_file():
                shutil.copyfile(checkpoints / "draft" / DRAFT_TO_TARGET, directory / DRAFT_TO_TARGET)
            tokenizer_files = tuple(name for name in TOKENIZER_FILES if (checkpoints / name).is_file())
            for name in tokenizer_files:
                shutil.copyfile(checkpoints / name, directory / name)
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                engine="tensorrt_llm",
                dtype=dtype,
                limits=Limits(**built["limits"]),
                target=describe_target(target),
                draft=describe_draft(draft) if draft else None,
                compiled=CompiledInfo(**built["compiled"]),
                tokenizer_files=tokenizer_files,
                files=tuple(FileInfo.of(path, path.name) for path in sorted(directory.iterdir())),
                sources=tuple(FileInfo(**source) for source in section["sources"]),
                versions={"ddtree-trtllm": version("ddtree-trtllm")} | built["versions"],
                notes=(NOTE,),
            )
            manifest.save(directory)
    except OSError as error:
        raise BuildError(reason(error, output)) from error
    return manifest


def _read_engine(directory: Path) -> tuple[dict[str, Any], str]:
    """What the engine's config.json has under "ddtree", and the engine's dtype."""
    for name in ("config.json", "rank0.engine"):
        if not (directory / name).is_file():
            raise BuildError(f"{directory}/{name} is missing (run trtllm-build with --output_dir {directory})")
    try:
        model = json.loads((directory / "config.json").read_text(encoding="utf-8"))["pretrained_config"]
        section, dtype = model["ddtree"], model["dtype"]
        section["engine"]["limits"], section["sources"]
    except (ValueError, KeyError, TypeError):
        raise BuildError(
            f"{directory} is no engine of ddtree's models (run trtllm-build with --model_cls_file and a checkpoint of "
            "ddtree convert)"
        ) from None
    return section, dtype


def _check_pair(target: dict[str, Any], draft: dict[str, Any]) -> None:
    """Both engines are of the same two checkpoints and have the same limits."""
    if target["sources"] != draft["sources"]:
        raise BuildError("the target's and the draft's engine are of different checkpoints (build both again)")
    for part in ("limits", "compiled", "versions"):
        for name, value in target["engine"][part].items():
            other = draft["engine"][part].get(name)
            if value != other:
                raise BuildError(
                    f"{name} of the target's engine is {value}, of the draft's {other} "
                    "(give trtllm-build the same options for both)"
                )
