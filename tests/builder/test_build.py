"""What a build leaves in the engine directory, and that whatever goes wrong leaves nothing."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.builder import BuildError, Manifest, build_engine
from ddtree.builder.errors import BusyError

from .models import CASES, LAYERS, VOCAB, Case, Pair, make_draft, make_target

FLOAT32 = Case("float32", "qwen3", (4, 2, 16), 48, False, torch.float32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a float32 target and drafter, to be copied before it is changed."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = make_target(FLOAT32, root / "target")
    make_draft(target, root / "draft", storage=torch.float32)
    return root


@pytest.fixture
def copy(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of the two checkpoints, to change."""
    for role in ("target", "draft"):
        shutil.copytree(checkpoints / role, tmp_path / role)
    return tmp_path


def build(root: Path, output: str = "engine", **settings: Any) -> Manifest:
    return build_engine(root / "target", root / "draft", root / output, **settings)


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refused(root: Path, *words: str, **settings: Any) -> str:
    """Build, expect a one-line error that has every word, and expect that nothing is left behind."""
    before = listing(root)
    with pytest.raises(BuildError) as caught:
        build(root, **settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert message.endswith(")"), f"no remedy: {message}"
    assert listing(root) == before
    return message


# The engine directory


def test_every_graph_passes_the_model_checker(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.directory, tmp_path / "engine")  # the checker takes hard links to a checkpoint for an attack
    for name in ("target.onnx", "draft.onnx"):
        onnx.checker.check_model(str(tmp_path / "engine" / name), full_check=True)


def test_weights_of_the_engines_dtype_are_the_checkpoints_own_files(copy: Path) -> None:
    build(copy)
    for role in ("target", "draft"):
        assert os.path.samefile(copy / f"engine/{role}-model.safetensors", copy / f"{role}/model.safetensors")
        rest = load_file(copy / f"engine/{role}.float32.safetensors")
        assert set(rest) == {"rotary.cos", "rotary.sin"}


def test_other_weights_are_converted_once(tmp_path: Path) -> None:
    target = make_target(CASES[2], tmp_path / "target")  # tied is False: head and embedding, in several shards
    make_draft(target, tmp_path / "draft")
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    manifest = build(tmp_path)
    weights = {path.name for path in (tmp_path / "engine").iterdir() if path.suffix == ".safetensors"}
    assert weights == {"target.float32.safetensors", "draft.float32.safetensors"}
    converted = load_file(tmp_path / "engine/target.float32.safetensors")
    for name, tensor in target.state_dict().items():
        assert torch.equal(converted[name], tensor)
    draft = load_file(tmp_path / "engine/draft.float32.safetensors")
    assert not {name for name in draft if "embed" in name or "lm_head" in name}
    assert len([file for file in manifest.sources if file.name.startswith("target/")]) > 1


def test_a_file_that_cannot_be_linked_is_copied_and_the_user_is_told(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, destination: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    manifest = build(copy)
    assert len(manifest.notes) == 2
    assert "target/model.safetensors" in " ".join(manifest.notes)
    assert (copy / "engine/target-model.safetensors").read_bytes() == (copy / "target/model.safetensors").read_bytes()


def test_weights_behind_symbolic_links_are_linked_to_the_real_file(copy: Path) -> None:
    """A Hugging Face cache holds symbolic links into a folder of blobs."""
    (copy / "target/model.safetensors").rename(copy / "blob")
    (copy / "target/model.safetensors").symlink_to(copy / "blob")
    build(copy)
    linked = copy / "engine/target-model.safetensors"
    assert not linked.is_symlink()
    assert os.path.samefile(linked, copy / "blob")


def test_the_manifest_says_what_was_built(copy: Path) -> None:
    change_json(copy / "target/generation_config.json", eos_token_id=[5, 6])
    built = build(copy, max_batch_size=3, max_seq_len=100, max_tree_nodes=31)
    manifest = Manifest.verify(copy / "engine")
    assert manifest == built
    assert (manifest.engine, manifest.dtype) == ("onnxruntime", "float32")
    assert (manifest.limits.max_batch_size, manifest.limits.max_seq_len, manifest.limits.max_tree_nodes) == (3, 100, 31)
    target, draft = manifest.target, manifest.draft
    assert (target.model_type, target.vocab_size, target.hidden_size, target.num_hidden_layers) == (
        "qwen3",
        VOCAB,
        48,
        LAYERS,
    )
    assert (target.num_key_value_heads, target.head_dim, target.window) == (2, 16, None)
    assert (target.eos_token_ids, target.bos_token_id) == ((5, 6), 2)
    assert draft is not None
    assert (draft.block_size, draft.sample_from_anchor, draft.max_depth, draft.mask_token_id) == (5, False, 4, 1)
    assert (draft.target_layer_ids, draft.vocab_size, draft.draft_to_target) == ((0, 2), VOCAB, None)
    assert manifest.compiled is None
    assert manifest.tokenizer_files == ("tokenizer.json", "generation_config.json")
    assert [file.name for file in manifest.sources] == [
        f"{role}/{name}" for role in ("target", "draft") for name in ("config.json", "model.safetensors")
    ]
    for source in manifest.sources:
        assert source.sha256 == hashlib.sha256((copy / source.name).read_bytes()).hexdigest()
    names = {file.name for file in manifest.files}
    assert {"target.onnx", "draft.onnx", "tokenizer.json", "generation_config.json"} <= names
    assert names | {"config.json"} == {path.name for path in (copy / "engine").iterdir()}


def test_without_a_drafter_there_is_no_draft_and_no_features(copy: Path) -> None:
    manifest = build_engine(copy / "target", None, copy / "engine")
    assert manifest.draft is None
    assert not (copy / "engine/draft.onnx").exists()
    outputs = [output.name for output in onnx.load(copy / "engine/target.onnx", load_external_data=False).graph.output]
    assert "context_features" not in outputs
    assert Manifest.load(copy / "engine") == manifest


def test_positions_of_the_last_tokens_block_are_in_the_tables(copy: Path) -> None:
    build(copy, max_seq_len=50)
    # The block starts at position 50 at the latest; before it lie at most D + 1 = 5 padded context rows.
    assert len(load_file(copy / "engine/draft.float32.safetensors")["rotary.cos"]) >= 50 + 5


@pytest.mark.parametrize(
    ("layout", "window"),
    [
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, (9, False)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (9, True)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": LAYERS}, (None, False)),
        ({"sliding_window": 9, "use_sliding_window": False}, (None, False)),
        ({"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention"] * LAYERS}, (9, False)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": None}, (None, False)),  # 28
    ],
)
def test_windows_are_read_as_transformers_does(copy: Path, layout: dict, window: tuple) -> None:
    change_json(copy / "target/config.json", **{"layer_types": None} | layout)
    manifest = build(copy)
    assert (manifest.target.window, manifest.target.sliding_mask) == window


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_config_as_transformers_4_writes_it_gives_the_same_engine(case: Case, tmp_path: Path) -> None:
    make_target(case, tmp_path / "target")
    build_engine(tmp_path / "target", None, tmp_path / "5")
    file = tmp_path / "target/config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters", None)  # there is none where transformers 4 runs this
    if rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
        if "num_local_experts" in config:
            config["num_experts"] = config.pop("num_local_experts")
        config.pop("layer_types", None)
    file.write_text(json.dumps(config))
    build_engine(tmp_path / "target", None, tmp_path / "4")
    for name in ("target.onnx", "target.float32.safetensors"):
        assert (tmp_path / "4" / name).read_bytes() == (tmp_path / "5" / name).read_bytes()


def test_every_spelling_of_rope_scaling_gives_the_same_tables(copy: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 32
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    config = copy / "target/config.json"
    tables = []
    for spelling in (
        {"rope_parameters": scaling | {"rope_theta": 5e5}, "rope_theta": None, "rope_scaling": None},
        {"rope_parameters": scaling, "rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": scaling},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": old},
    ):
        change_json(config, **spelling)
        build(copy, force=True)
        tables.append((copy / "engine/target.float32.safetensors").read_bytes())
    assert len(set(tables)) == 1


def test_a_head_that_is_stored_beside_a_tied_embedding(copy: Path) -> None:
    change_json(copy / "target/config.json", tie_word_embeddings=True)
    refused(copy, "tie_word_embeddings", "lm_head.weight differs")
    change_tensors(
        copy / "target/model.safetensors",
        lambda tensors: tensors.__setitem__("lm_head.weight", tensors["model.embed_tokens.weight"].clone()),
    )
    build(copy)


def test_frequencies_that_old_llamas_store_are_not_needed(copy: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(copy / "target/model.safetensors", put(name, torch.ones(8)))
    build(copy)


@pytest.mark.parametrize(
    ("d2t", "t2d", "ids"),
    [
        ([0, 0, 3, 3], None, [0, 1, 5, 6]),  # offsets: as ids, 0 and 3 would come twice
        ([90, 92, 94, 95], None, [90, 92, 94, 95]),  # ids: as offsets, they would reach past the vocabulary
        ([0, 1, 2, 3], [0, 2, 4, 6], [0, 2, 4, 6]),  # t2d tells
        ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([0, 0, 0, 0], None, [0, 1, 2, 3]),
    ],
)
def test_a_reduced_vocabulary_becomes_target_ids(tmp_path: Path, d2t: list, t2d: list | None, ids: list) -> None:
    target = make_target(FLOAT32, tmp_path / "target")
    extra = {"d2t": torch.tensor(d2t)}
    if t2d is not None:
        extra["t2d"] = torch.isin(torch.arange(VOCAB), torch.tensor(t2d))
    make_draft(target, tmp_path / "draft", draft_vocab_size=4, extra_tensors=extra)
    manifest = build(tmp_path)
    assert manifest.draft is not None
    assert manifest.draft.vocab_size == 4
    assert manifest.draft.draft_to_target is not None
    table = np.load(tmp_path / "engine" / manifest.draft.draft_to_target, allow_pickle=False)
    assert table.dtype == np.int32
    assert table.tolist() == ids


# The output directory


def test_an_engine_is_replaced_only_when_asked(copy: Path) -> None:
    first = build(copy)
    assert "--force" in refused(copy, "holds an engine already")
    assert build(copy, force=True, max_tree_nodes=7).limits.max_tree_nodes == 7
    assert Manifest.verify(copy / "engine") != first
    assert {path.name for path in copy.iterdir()} == {"target", "draft", "engine"}


def test_a_damaged_engine_can_be_replaced(copy: Path) -> None:
    build(copy)
    (copy / "engine/target.onnx").unlink()
    build(copy, force=True)
    Manifest.verify(copy / "engine")


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_is_no_engine_is_never_touched(copy: Path, force: bool) -> None:
    refused(copy, "not an engine", output="target", force=force)


def test_an_empty_directory_is_used(copy: Path) -> None:
    (copy / "engine").mkdir()
    build(copy)
    Manifest.verify(copy / "engine")


def test_missing_parents_are_made_and_gone_after_a_failure(copy: Path) -> None:
    build(copy, output="new/deep/engine")
    Manifest.verify(copy / "new/deep/engine")
    shutil.rmtree(copy / "new")
    (copy / "draft/model.safetensors").unlink()
    refused(copy, "model.safetensors", output="new/deep/engine")


def test_an_output_that_cannot_be_written_is_refused(copy: Path) -> None:
    (copy / "file").write_text("not a directory")
    refused(copy, "file", output="file")
    refused(copy, "file", output="file/engine")


def test_a_full_disk_leaves_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own error: the weight file is opened on /dev/full, where every write finds no space."""
    build(copy)
    before = Manifest.verify(copy / "engine")
    original = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", *args, **kwargs: original(
            Path("/dev/full") if "w" in mode and path.name.endswith(".safetensors") else path, mode, *args, **kwargs
        ),
    )
    assert "no space left" in refused(copy, "engine2", output="engine2")
    refused(copy, "no space left", force=True)
    monkeypatch.undo()
    assert Manifest.verify(copy / "engine") == before


def test_an_interrupt_leaves_nothing(copy: Path) -> None:
    def interrupt(doing: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = listing(copy)
    with pytest.raises(KeyboardInterrupt):
        build(copy, output="new/engine", progress=interrupt)
    assert listing(copy) == before


def test_progress_reaches_its_end(copy: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    build(copy, progress=lambda doing, done, total: seen.append((doing, done, total)))
    for role in ("target", "draft"):
        steps = [(done, total) for doing, done, total in seen if role in doing]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


def test_two_builds_into_one_directory_are_refused(copy: Path) -> None:
    """The second is another process, or as here another call: the first goes on and ends well."""
    refusals = []

    def second(doing: str, done: int, total: int) -> None:
        if not refusals:
            with pytest.raises(BusyError) as caught:
                build(copy)
            refusals.append(str(caught.value))

    manifest = build(copy, progress=second)
    assert refusals == [f"another process is building {copy}/engine (wait for it, or use another directory)"]
    assert Manifest.verify(copy / "engine") == manifest
    assert {path.name for path in copy.iterdir()} == {"target", "draft", "engine"}
    build(copy, force=True)  # nothing holds on to the directory


def test_builds_into_two_directories_do_not_meet(copy: Path) -> None:
    built = []

    def second(doing: str, done: int, total: int) -> None:
        if not built:
            built.append(build(copy, output="engine.2"))

    build(copy, progress=second)
    assert built == [Manifest.verify(copy / "engine.2")]
    Manifest.verify(copy / "engine")


def test_what_a_killed_build_left_is_removed_by_the_next(copy: Path) -> None:
    (copy / ".engine.building/graphs").mkdir(parents=True)
    (copy / ".engine.building/graphs/target.onnx").write_bytes(b"half")
    (copy / ".engine.building/config.json").write_text("{}")
    manifest = build(copy)
    assert Manifest.verify(copy / "engine") == manifest
    assert {path.name for path in copy.iterdir()} == {"target", "draft", "engine"}


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "onnx"}, ["engine 'onnx' is not known (use onnxruntime, tensorrt, tensorrt_rtx)"]),
        ({"dtype": "float16"}, ["dtype 'float16' does not go with engine onnxruntime (use float32)"]),
        ({"dtype": "int8"}, ["int8", "float32"]),
        ({"engine": "tensorrt", "dtype": "float32"}, ["dtype 'float32'", "engine tensorrt (use bfloat16, float16)"]),
        ({"engine": "tensorrt-rtx", "dtype": "float32"}, ["'float32'", "engine tensorrt_rtx (use bfloat16, float16)"]),
        ({"engine": "tensorrt_rtx", "arch": "sm_100"}, ["arch 'sm_100'", "engine tensorrt_rtx (use sm_120)"]),
        ({"arch": "sm_120"}, ["arch 'sm_120' does not go with engine onnxruntime (leave it out)"]),
        ({"verify": "kernel"}, ["verify 'kernel' does not go with engine onnxruntime (leave it out)"]),
        ({"engine": "tensorrt-rtx", "verify": "plugin"}, ["verify 'plugin'", "engine tensorrt_rtx (use kernel)"]),
        ({"engine": "tensorrt", "verify": "host"}, ["verify 'host'", "(use plugin, kernel)"]),
        ({"engine": "tensorrt_rtx", "timing_cache": Path("t")}, ["timing cache t", "tensorrt_rtx", "(leave it out)"]),
        ({"max_batch_size": 0}, ["max_batch_size 0"]),
        ({"max_tree_nodes": 0}, ["max_tree_nodes 0"]),
        ({"max_tree_nodes": 1024}, ["max_tree_nodes 1024 is out of range (use 1 to 1023)"]),
        ({"max_tree_nodes": -5}, ["max_tree_nodes -5"]),
        ({"max_seq_len": 257}, ["257", "max_position_embeddings 256"]),
        ({"max_seq_len": 1}, ["max_seq_len 1"]),
        ({"max_seq_len": 0}, ["max_seq_len 0"]),
    ],
)
def test_settings_out_of_range(copy: Path, settings: dict, words: list) -> None:
    refused(copy, *words, **settings)


def test_the_drafters_shorter_context_limits_the_length(copy: Path) -> None:
    change_json(copy / "draft/config.json", max_position_embeddings=64)
    assert build(copy).limits.max_seq_len == 64
    refused(copy, "draft", "64", max_seq_len=65, output="other")


# Checkpoints


def test_missing_checkpoints(copy: Path) -> None:
    for role in ("target", "draft"):
        paths = {"target": copy / "target", "draft": copy / "draft"} | {role: copy / "nowhere"}
        with pytest.raises(BuildError, match=f"{role} checkpoint .*nowhere is not a directory"):
            build_engine(paths["target"], paths["draft"], copy / "engine")
        (copy / role / "config.json").rename(copy / "moved")
        refused(copy, role, "no config.json")
        (copy / "moved").rename(copy / role / "config.json")
        (copy / role / "model.safetensors").rename(copy / "moved")
        refused(copy, role, "no model.safetensors")
        (copy / role / "pytorch_model.bin").touch()
        refused(copy, role, "pickled")
        (copy / role / "pytorch_model.bin").unlink()
        (copy / "moved").rename(copy / role / "model.safetensors")
    (copy / "target/tokenizer.json").rename(copy / "moved")
    refused(copy, "target", "no tokenizer.json", "save_pretrained")
    (copy / "moved").rename(copy / "target/tokenizer.json")
    build(copy)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"model_type": "qwen3"', "\udcff"])
@pytest.mark.parametrize("file", ["target/config.json", "draft/config.json", "target/generation_config.json"])
def test_json_that_is_none(copy: Path, file: str, text: str) -> None:
    (copy / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(copy, file)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    target = make_target(CASES[2], tmp_path / "target")
    make_draft(target, tmp_path / "draft")
    shard = max((tmp_path / "target").glob("*.safetensors"))
    shard.unlink()
    refused(tmp_path, shard.name)
    (tmp_path / "target/model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "weight_map")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, 0.5, -1])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_truncated_weight_file(copy: Path, role: str, keep: float) -> None:
    file = copy / role / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    refused(copy, f"{role}/model.safetensors", "download")


def entry(**changes: Any) -> Callable[[dict], dict]:
    return lambda header: header | {"norm.weight": header["norm.weight"] | changes}


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: [],
        lambda header: header | {"norm.weight": 1},
        lambda header: header | {"norm.weight": {}},
        entry(dtype="F99"),
        entry(shape="48"),
        entry(shape=[-48]),
        entry(shape=[47]),
        entry(data_offsets=[0]),
        entry(data_offsets=[-192, 0]),
        entry(data_offsets=[1 << 40, (1 << 40) + 192]),
        entry(data_offsets=["a", "b"]),
    ],
)
def test_a_damaged_safetensors_header(copy: Path, damage: Callable[[dict], dict]) -> None:
    file = copy / "draft/model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(damage(json.loads(content[8 : 8 + length]))).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    refused(copy, "draft/model.safetensors")


def test_weights_of_four_bits(copy: Path) -> None:
    file = copy / "draft/model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F4" ', 1))
    refused(copy, "draft/model.safetensors", "is F4 (use the float16, bfloat16 or float32 checkpoint)")


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def poison(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors[name].view(-1)[-1].fill_(value)


Q = "layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("role", "change", "words"),
    [
        ("target", lambda tensors: tensors.pop("model." + Q), [Q, "no tensor"]),
        ("target", lambda tensors: tensors.pop("lm_head.weight"), ["lm_head.weight"]),
        ("draft", lambda tensors: tensors.pop("fc.weight"), ["fc.weight"]),
        ("target", put("model." + Q, torch.zeros(64, 47)), [Q, "[64, 47]", "[64, 48]"]),
        ("draft", put("fc.weight", torch.zeros(48, 48)), ["fc.weight", "[48, 48]", "[48, 96]"]),
        ("target", put("model." + Q, torch.zeros(64, 48, dtype=torch.int8)), [Q, "I8"]),
        ("target", poison("model." + Q, float("nan")), [Q, "NaN"]),
        ("draft", poison("norm.weight", float("inf")), ["norm.weight", "infinity"]),
        (
            "target",
            put("model.layers.1.self_attn.q_proj.bias", torch.zeros(64)),
            ["q_proj.bias", "another architecture"],
        ),
        ("target", put("model." + Q.replace("1", "4"), torch.zeros(64, 48)), ["layers.4", "more layers"]),
        ("target", put("score.weight", torch.zeros(2, 48)), ["score.weight", "another architecture"]),
        ("draft", put("layers.2.input_layernorm.weight", torch.ones(48)), ["layers.2", "more layers"]),
    ],
)
def test_weights_that_do_not_fit(copy: Path, role: str, change: Callable, words: list) -> None:
    change_tensors(copy / role / "model.safetensors", change)
    refused(copy, *words)


def test_a_checkpoint_that_modelopt_quantized(copy: Path) -> None:
    for role in ("target", "draft"):
        (copy / role / "hf_quant_config.json").write_text("{}")
        refused(copy, role, "quantized", "hf_quant_config.json", "bfloat16")
        (copy / role / "hf_quant_config.json").unlink()


def test_a_damaged_half_precision_weight(tmp_path: Path) -> None:
    target = make_target(CASES[0], tmp_path / "target")
    make_draft(target, tmp_path / "draft")
    change_tensors(tmp_path / "target/model.safetensors", poison("model." + Q, float("nan")))
    refused(tmp_path, Q, "NaN")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba2"}, ['"mamba2" is not supported (supported: qwen3, qwen3_moe, qwen2, llama, mistral)']),
        ({"model_type": "gemma3"}, ['"gemma3" is not supported']),
        ({"model_type": ["qwen3"]}, ['["qwen3"] is not supported']),
        ({"model_type": None}, ["model_type null"]),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, ["Qwen3ForSequenceClassification", "Qwen3ForCausalLM"]),
        ({"architectures": ["DFlashDraftModel"]}, ["DFlashDraftModel", "is a DFlash drafter, not a target"]),
        ({"architectures": 5}, ["architectures 5", "Qwen3ForCausalLM"]),
        ({"architectures": [["DFlashDraftModel"]]}, ["architectures", "Qwen3ForCausalLM"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantized (fp8)", "plain floats", "bfloat16"]),
        ({"quantization_config": 8}, ["quantization_config"]),
        ({"hidden_act": "gelu"}, ['hidden_act "gelu"', "silu"]),
        ({"mlp_bias": True}, ["mlp_bias", "Qwen3ForCausalLM"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping 50.0"]),
        ({"query_pre_attn_scalar": 256}, ["query_pre_attn_scalar 256"]),
        ({"residual_multiplier": 0.22}, ["residual_multiplier 0.22"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim 15"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, ["yarn", "llama3"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, ["dynamic"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, ["longrope"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, ["mrope"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention", "differ by layer"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["factor"]),
        ({"rope_parameters": [1]}, ["rope_parameters"]),
        ({"rope_parameters": None, "rope_scaling": "linear"}, ["rope_scaling"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, ["partial_rotary_factor 0.25"]),
        ({"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types"]),
        ({"sliding_window": 4, "use_sliding_window": True, "layer_types": ["linear"] * LAYERS}, ["layer_types"]),
    ],
)
def test_targets_that_are_not_supported(copy: Path, changes: dict, words: list) -> None:
    change_json(copy / "target/config.json", **changes)
    refused(copy, "target/config.json", *words)


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (MISTRAL | {"attention_bias": True}, ["attention_bias", "MistralForCausalLM"]),
        (MISTRAL | {"sliding_window": 0}, ["sliding_window is 0"]),
        (MISTRAL | {"sliding_window": 4, "layer_types": ["full_attention"] * LAYERS}, ["layer_types", "Mistral"]),
        (
            {"model_type": "llama", "architectures": None, "use_sliding_window": True, "sliding_window": 4},
            ["use_sliding_window", "LlamaForCausalLM"],
        ),
        (MIXTURE, ["num_experts_per_tok"]),
        (MIXTURE | {"num_experts": None}, ["num_local_experts is None"]),
        (MIXTURE | {"num_experts_per_tok": 5}, ["num_experts_per_tok 5 exceeds", "4"]),
        (MIXTURE | {"num_experts_per_tok": 2}, ["moe_intermediate_size"]),
        (MIXTURE | {"num_experts_per_tok": 2, "decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        (MIXTURE | {"num_experts_per_tok": 2, "mlp_only_layers": 3}, ["mlp_only_layers 3"]),
        (
            MIXTURE | {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 8},
            ["shared_expert_intermediate_size 8"],
        ),
    ],
)
def test_targets_of_other_architectures_that_are_not_supported(copy: Path, changes: dict, words: list) -> None:
    change_json(copy / "target/config.json", **{"layer_types": None} | changes)
    refused(copy, "target/config.json", *words)


@pytest.mark.parametrize("value", [VOCAB, -1, "</s>", [1.5], {}])
def test_end_tokens_outside_the_vocabulary(copy: Path, value: Any) -> None:
    change_json(copy / "target/generation_config.json", eos_token_id=value)
    refused(copy, "eos_token_id")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, ["Qwen3ForCausalLM", "DFlashDraftModel"]),
        ({"architectures": ["DFlash2DraftModel"]}, ["DFlash2DraftModel"]),
        ({"architectures": "DFlashDraftModel"}, ["architecture"]),
        ({"architectures": None}, ["architecture"]),
        ({"architectures": 5}, ["architecture"]),
        ({"architectures": [{}]}, ["architecture"]),
        ({"hidden_size": 64}, ["hidden_size 64", "48", "another target"]),
        ({"vocab_size": 98}, ["vocab_size 98", "97", "another target"]),
        ({"num_target_layers": 36}, ["num_target_layers 36", "4", "another target"]),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 4]}}, ["target_layer_ids has 4", "0 to 3"]),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1]}}, ["target_layer_ids has -1"]),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, ["target_layer_ids"]),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": 3}}, ["target_layer_ids"]),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, ["mask_token_id"]),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 2]}}, ["mask_token_id 97", "97"]),
        ({"dflash_config": "none"}, ["dflash_config"]),
        ({"block_size": 1}, ["block_size 1", "2"]),
        ({"block_size": 0}, ["block_size"]),
        ({"draft_vocab_size": 98}, ["draft_vocab_size 98", "97"]),
        ({"draft_vocab_size": 40}, ["lm_head.weight"]),
        ({"markov_rank": 256}, ["markov_rank 256"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
    ],
)
def test_drafters_of_another_kind_or_target(copy: Path, changes: dict, words: list) -> None:
    change_json(copy / "draft/config.json", **changes)
    refused(copy, "draft", *words)


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        ([1, 2, 3, 4], ["may hold target ids or offsets", "t2d"]),
        ([0, 0, -1, -1], ["d2t does not name"]),
        ([96, 96, 96, 96], ["d2t does not name"]),
        ([0, 1, 2], ["d2t", "[3]", "[4]"]),
        (None, ["d2t"]),
    ],
)
def test_reduced_vocabularies_that_are_wrong(tmp_path: Path, d2t: list | None, words: list) -> None:
    target = make_target(FLOAT32, tmp_path / "target")
    extra = {} if d2t is None else {"d2t": torch.tensor(d2t)}
    make_draft(target, tmp_path / "draft", draft_vocab_size=4, extra_tensors=extra)
    refused(tmp_path, *words)


# Imports


def test_the_builder_is_imported_and_an_engine_read_without_heavy_libraries(copy: Path) -> None:
    build(copy)
    script = (
        "import sys; from ddtree.builder import Manifest, build_engine; Manifest.load(sys.argv[1]);"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(copy / "engine")], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_force_through_a_symbolic_link_replaces_what_it_names(copy: Path) -> None:
    build(copy)
    (copy / "link").symlink_to(copy / "engine")
    build(copy, "link", force=True, max_tree_nodes=7)
    assert (copy / "link").is_symlink()
    assert Manifest.load(copy / "engine").limits.max_tree_nodes == 7
