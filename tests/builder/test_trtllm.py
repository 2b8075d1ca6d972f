"""From Hugging Face checkpoints through ``ddtree convert`` and ``trtllm-build`` to an engine directory.

TensorRT-LLM is not here. ``trtllm_stand_in`` does what its ``trtllm-build`` does, with every call of the module bound
against ``trtllm_signatures``; the module runs over a real network that a real parser of TensorRT fills.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.builder import BuildError, Manifest, build_engine
from ddtree.builder.manifest import Limits
from ddtree.builder.trtllm_checkpoint import MODEL_FILE, build_commands, convert_checkpoints
from ddtree.builder.trtllm_engine import collect_engines
from ddtree.plugins.operations import BUILD_TREE, VERIFY_TREE, mask_words

from . import trtllm_stand_in
from .models import VOCAB, Case, make_draft, make_target
from .trtllm_signatures import TENSORRT_VERSION, VERSION
from .trtllm_stand_in import Network, installed, trtllm_build

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")  # TensorRT-LLM's way to load the module

ROLES = ("target", "draft")
LAYERS, HEAD_DIM, HIDDEN, BUDGET = 2, 16, 64, 15
CASE = Case("small", "qwen3", (4, 2, HEAD_DIM), HIDDEN, False, torch.bfloat16, "40KB", config={
    "num_hidden_layers": LAYERS, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
})  # fmt: skip
TIED = Case("tied", "llama", (4, 2, HEAD_DIM), HIDDEN, True, torch.float32, config={"num_hidden_layers": LAYERS})
OPTIONS = ("--max_batch_size", "3", "--max_seq_len", "100")


def make_pair(root: Path, case: Case = CASE, **draft_keys: Any) -> Path:
    target = make_target(case, root / "target")
    ids = {"mask_token_id": 1, "target_layer_ids": [0, 1]}
    settings = {"num_target_layers": LAYERS, "target_layer_ids": [0, 1], "dflash_config": ids, "layers": 1}
    make_draft(target, root / "draft", **settings | draft_keys)
    return root


def convert(root: Path, name: str = "checkpoints", draft: bool = True, **settings: Any) -> Path:
    settings = {"max_tree_nodes": BUDGET, "progress": lambda *_: None} | settings
    convert_checkpoints(root / "target", root / "draft" if draft else None, root / name, **settings)
    return root / name


def run(command: str, *more: str, dry_run: bool = True, **changed: Any) -> Network:
    """A command line of ``trtllm-build``, executed by the stand-in; the last of an option counts."""
    program, *arguments = [*shlex.split(command), *more]
    assert program == "trtllm-build"
    options: dict[str, Any] = {}
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        options[name.removeprefix("--")] = int(value) if value.isdigit() else value
    paths = {name: Path(options.pop(name)) for name in ("checkpoint_dir", "output_dir", "model_cls_file")}
    return trtllm_build(**paths | options | changed, dry_run=dry_run)


@dataclass(frozen=True)
class Built:
    root: Path  # target, draft: Hugging Face; checkpoints: TensorRT-LLM, with the engines
    networks: dict[str, Network]

    def inputs(self, role: str) -> dict[str, Any]:
        real = self.networks[role].trt_network.real
        return {tensor.name: tensor for tensor in (real.get_input(i) for i in range(real.num_inputs))}

    def outputs(self, role: str) -> dict[str, Any]:
        real = self.networks[role].trt_network.real
        return {tensor.name: tensor for tensor in (real.get_output(i) for i in range(real.num_outputs))}

    def ranges(self, role: str, name: str) -> list[list[list[int]]]:
        """Least, best and largest shapes of an input, in each profile."""
        profiles = self.networks[role]._inputs[name].profiles
        return [[ranges.min, ranges.opt, ranges.max] for ranges in profiles]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = make_pair(tmp_path_factory.mktemp("pair"))
    commands = build_commands(convert(root))
    with installed():
        networks = {role: run(line, *OPTIONS, dry_run=False) for role, line in zip(ROLES, commands, strict=True)}
    return Built(root, networks)


@pytest.fixture
def checkpoints(built: Built, tmp_path: Path) -> Path:
    """A copy of the checkpoints, without engines."""
    for role in ("target", "draft"):
        shutil.copytree(built.root / "checkpoints" / role, tmp_path / "checkpoints" / role)
    return tmp_path / "checkpoints"


@pytest.fixture
def trtllm() -> Iterator[None]:
    with installed():
        yield


# Checkpoints


def test_the_target_has_its_tensors_by_their_names(built: Built) -> None:
    converted = load_file(built.root / "checkpoints/target/rank0.safetensors")
    shards = sorted((built.root / "target").glob("*.safetensors"))
    assert len(shards) > 1
    original = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert converted.keys() == original.keys()
    for name, tensor in original.items():
        assert converted[name].dtype == torch.bfloat16
        assert torch.equal(converted[name], tensor)


def test_the_draft_has_the_targets_embedding_and_head_too(built: Built) -> None:
    converted = load_file(built.root / "checkpoints/draft/rank0.safetensors")
    own = load_file(built.root / "draft/model.safetensors")  # float16
    target = load_file(built.root / "checkpoints/target/rank0.safetensors")
    borrowed = {name: target[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert converted.keys() == own.keys() | borrowed.keys()
    for name, tensor in (own | borrowed).items():
        assert torch.equal(converted[name], tensor.to(torch.bfloat16))


def test_a_tied_embedding_is_there_once_and_float32_becomes_bfloat16(tmp_path: Path) -> None:
    checkpoints = convert(make_pair(tmp_path, TIED))
    original = load_file(tmp_path / "target/model.safetensors")["model.embed_tokens.weight"]
    assert original.dtype == torch.float32
    for role in ("target", "draft"):
        converted = load_file(checkpoints / role / "rank0.safetensors")
        assert "lm_head.weight" not in converted
        assert torch.equal(converted["model.embed_tokens.weight"], original.to(torch.bfloat16))


def put_under_model(draft: Path, **more: torch.Tensor) -> None:
    """Give the drafter's tensors the prefix that some checkpoints have."""
    tensors = load_file(draft / "model.safetensors") | more
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, draft / "model.safetensors")


def test_a_drafter_with_a_prefix_and_its_own_embedding(tmp_path: Path, trtllm: None) -> None:
    make_pair(tmp_path)
    embedding = torch.randn(VOCAB, HIDDEN)
    put_under_model(tmp_path / "draft", **{"embed_tokens.weight": embedding})
    checkpoints = convert(tmp_path)
    converted = load_file(checkpoints / "draft/rank0.safetensors")
    assert torch.equal(converted["model.embed_tokens.weight"], embedding.to(torch.bfloat16))
    assert "lm_head.weight" in converted
    run(build_commands(checkpoints)[1], *OPTIONS)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """The drafter's own embedding, and the target's, which is the head of both models."""
    make_pair(tmp_path, TIED)
    put_under_model(tmp_path / "draft", **{"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)})
    with pytest.raises(BuildError, match=r"has its own model.embed_tokens.weight, which is the head in a target that"):
        convert(tmp_path)


def test_configs_are_those_of_tensorrt_llm(built: Built) -> None:
    target, draft = (json.loads((built.root / f"checkpoints/{role}/config.json").read_text()) for role in ROLES)
    for config, architecture, heads, inner, layers in (
        (target, "DDTreeTarget", 4, 80, LAYERS),
        (draft, "DDTreeDraft", 4, 72, 1),
    ):
        assert config["architecture"] == architecture
        assert (config["dtype"], config["vocab_size"], config["hidden_size"]) == ("bfloat16", VOCAB, HIDDEN)
        assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_size"]) == (
            heads,
            2,
            HEAD_DIM,
        )
        assert (config["intermediate_size"], config["num_hidden_layers"]) == (inner, layers)
        assert (config["max_position_embeddings"], config["max_draft_len"]) == (256, BUDGET)
        assert config["quantization"]["quant_algo"] is None
        assert config["ddtree"] == target["ddtree"]
    names = {source["name"] for source in target["ddtree"]["sources"]}
    assert names >= {"target/config.json", "draft/config.json", "draft/model.safetensors"}


def test_tokenizer_files_come_along(built: Built) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        assert (built.root / "checkpoints" / name).read_bytes() == (built.root / "target" / name).read_bytes()


def test_a_reduced_draft_vocabulary_becomes_target_ids(tmp_path: Path, trtllm: None) -> None:
    ids = torch.arange(0, 2 * 40, 2)
    marked = torch.isin(torch.arange(VOCAB), ids)
    keys = {"draft_vocab_size": 40, "extra_tensors": {"d2t": ids, "t2d": marked}}
    checkpoints = convert(make_pair(tmp_path, **keys))
    assert np.load(checkpoints / "draft/draft_to_target.npy").tolist() == ids.tolist()
    assert load_file(checkpoints / "draft/rank0.safetensors")["lm_head.weight"].shape == (40, HIDDEN)
    network = run(build_commands(checkpoints)[1], *OPTIONS)
    topk = network.trt_network.layers[0]
    assert tuple(topk.inputs[1].shape) == (40,)
    assert "draft_to_target" not in network._inputs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, r"^dtype 'float32' does not go with TensorRT-LLM \(use bfloat16, float16\)$"),
        ({"max_tree_nodes": 0}, r"^max_tree_nodes 0 is out of range \(use 1 to 1023\)$"),
        ({"max_tree_nodes": 1024}, r"^max_tree_nodes 1024 is out of range \(use 1 to 1023\)$"),
    ],
)
def test_settings_that_cannot_be_are_refused(built: Built, tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        convert_checkpoints(built.root / "target", None, tmp_path / "out", **{"progress": lambda *_: None} | settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("role", "keys", "message"),
    [
        ("target", {"model_type": "mamba2"}, 'model_type "mamba2" is not supported'),
        ("target", {"quantization_config": {"quant_method": "awq"}}, r"the weights are quantized \(awq\)"),
        ("target", {"tie_word_embeddings": True}, "but lm_head.weight differs from the embedding"),
        ("draft", {"architectures": ["LlamaForCausalLM"]}, "is not a DFlash drafter"),
        ("draft", {"hidden_size": 32}, r"hidden_size 32 differs from the target's 64 \(this drafter belongs"),
        ("draft", {"num_target_layers": 9}, r"num_target_layers 9 differs from the target's 2 \(this drafter belongs"),
        ("draft", {"quantization_config": {"quant_method": "fp8"}}, r"the weights are quantized \(fp8\)"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused_and_leave_nothing(
    built: Built, tmp_path: Path, role: str, keys: dict, message: str
) -> None:
    for each in ROLES:
        shutil.copytree(built.root / each, tmp_path / each)
    path = tmp_path / role / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BuildError, match=message) as caught:
        convert(tmp_path)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_that_is_there_is_not_touched(built: Built, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(BuildError, match=r"out is not empty and not an engine \(use another directory\)$"):
        convert_checkpoints(built.root / "target", None, tmp_path / "out", progress=lambda *_: None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_interrupted_conversion_leaves_nothing(built: Built, tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoints(built.root / "target", None, tmp_path / "a" / "out", progress=interrupt)
    assert not list(tmp_path.iterdir())


# Networks


def test_inputs_of_the_target_and_their_ranges(built: Built) -> None:
    cache = 256  # 100 tokens and a chunk of 100, in steps of 64
    prompt, tree = ((1, 1), (3, 100), (3, 100)), ((1, 1), (3, 16), (3, 16))
    words = mask_words(VOCAB)
    expected = {
        "input_ids": (prompt, tree),
        "position_ids": (prompt, tree),
        "logit_rows": (((1, 1), (3, 1), (3, 1)), tree),
        "write_index": (((1,), (3,), (3,)),) * 2,
        "attention_mask": tuple([(n, 1, rows, cache) for n, rows in sizes] for sizes in (prompt, tree)),
        "sliding_attention_mask": tuple([(n, 1, rows, cache) for n, rows in sizes] for sizes in (prompt, tree)),
        "token_bitmask": (((1, 1, 0), (3, 1, 0), (3, 1, words)), ((1, 1, 0), (3, 16, 0), (3, 16, words))),
        "coins": (((1, 0), (3, 0), (3, 0)),) * 2,
        "final_coin": (((0,), (0,), (0,)),) * 2,
    }
    expected |= dict.fromkeys(("token_ids", "next_token", "next_sibling"), expected["logit_rows"])
    slots = ("node_count", "root_positions", "temperature", "top_k", "top_p", "min_p", "seed")
    expected |= dict.fromkeys(slots, expected["write_index"])
    expected |= {
        f"past_key_values.{layer}.{part}": ([(n, 2, cache, HEAD_DIM) for n in (1, 3, 3)],) * 2
        for layer in range(LAYERS)
        for part in ("key", "value")
    }
    assert set(built.inputs("target")) == set(expected)
    for name, (first, second) in expected.items():
        assert built.ranges("target", name) == [list(map(list, first)), list(map(list, second))], name
    types = {name: tensor.dtype.name for name, tensor in built.inputs("target").items()}
    assert types["attention_mask"] == types["past_key_values.0.key"] == "BF16"
    assert types["input_ids"] == types["write_index"] == types["seed"] == types["root_positions"] == "INT64"
    assert types["token_ids"] == types["top_k"] == types["token_bitmask"] == "INT32"


def test_outputs_of_the_target(built: Built) -> None:
    updates = [f"update.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    outputs = built.outputs("target")
    assert set(outputs) == {"logits", "context_features", *updates, *(spec.name for spec in VERIFY_TREE.outputs)}
    assert tuple(outputs["logits"].shape)[2] == VOCAB
    for name in updates:
        assert tuple(outputs[name].shape)[1::2] == (2, HEAD_DIM)
        assert outputs[name].dtype.name == "BF16"


def test_inputs_of_the_draft_and_their_ranges(built: Built) -> None:
    cache, block, depth = 256, 5, 4  # 100 tokens, a chunk of 100, and the block
    slots = [(1,), (3,), (3,)]
    chunk, accepted = [(1, 1), (3, 100), (3, 100)], [(1, 1), (3, depth + 1), (3, depth + 1)]
    expected = {
        "context_features": tuple([(n, rows, 2 * HIDDEN) for n, rows in sizes] for sizes in (chunk, accepted)),
        "context_position_ids": (chunk, accepted),
        "block_ids": ([(n, block) for (n,) in slots],) * 2,
        "block_position_ids": ([(n, block) for (n,) in slots],) * 2,
        "attention_mask": ([(n, 1, block, cache) for (n,) in slots],) * 2,
        "write_index": (slots,) * 2,
        "past_key_values.0.key": ([(n, 2, cache, HEAD_DIM) for (n,) in slots],) * 2,
        "past_key_values.0.value": ([(n, 2, cache, HEAD_DIM) for (n,) in slots],) * 2,
        "root_token_ids": (slots,) * 2,
        "draft_to_target": ([(0,)] * 3,) * 2,
    }
    assert set(built.inputs("draft")) == set(expected)
    for name, (first, second) in expected.items():
        assert built.ranges("draft", name) == [list(map(list, first)), list(map(list, second))], name


def test_outputs_of_the_draft(built: Built) -> None:
    updates = ["update.0.key", "update.0.value"]
    outputs = built.outputs("draft")
    assert set(outputs) == {"draft_logits", *updates, *(spec.name for spec in BUILD_TREE.outputs)}
    assert tuple(outputs["draft_logits"].shape) == (-1, 4, VOCAB)


def test_the_target_ends_in_verify_tree(built: Built) -> None:
    (layer,) = built.networks["target"].trt_network.layers
    assert (layer.name, layer.attributes) == ("verify_tree", {"method": "coupled"})
    for tensor, spec in zip(layer.inputs, VERIFY_TREE.inputs, strict=True):
        assert tensor.name == spec.name or spec.name in ("thresholds", "max_depth_shape")
    assert tuple(layer.inputs[-1].shape) == (4,)  # D


def test_the_draft_ends_in_build_tree(built: Built) -> None:
    topk, tree = built.networks["draft"].trt_network.layers
    assert (topk.name, topk.attributes) == ("draft_topk", {"k": BUDGET})
    assert [tensor.name for tensor in topk.inputs] == ["draft_logits", "draft_to_target"]
    assert tree.attributes == {"budget": BUDGET, "mode": "tree", "keep_chain": False}
    assert tree.inputs[2].name == "root_token_ids"


def test_max_draft_len_overrides_the_budget(checkpoints: Path, trtllm: None) -> None:
    network = run(build_commands(checkpoints)[1], *OPTIONS, "--max_draft_len", "31")
    topk, tree = network.trt_network.layers
    assert (topk.attributes["k"], tree.attributes["budget"]) == (31, 31)


def test_a_target_without_a_drafter(built: Built, tmp_path: Path, trtllm: None) -> None:
    shutil.copytree(built.root / "target", tmp_path / "target")
    checkpoints = convert(tmp_path, draft=False)
    (command,) = build_commands(checkpoints)
    network = run(command, *OPTIONS)
    real = network.trt_network.real
    outputs = {real.get_output(i).name for i in range(real.num_outputs)}
    assert "context_features" not in outputs
    assert {spec.name for spec in VERIFY_TREE.outputs} | {"logits"} < outputs
    assert tuple(network.trt_network.layers[0].inputs[-1].shape) == (1,)  # D
    (checkpoints / "target-engine/rank0.engine").write_bytes(b"engine")
    manifest = collect_engines(checkpoints, tmp_path / "engine")
    assert manifest.draft is None
    assert {file.name for file in manifest.files} == {"target.engine", "tokenizer.json", "generation_config.json"}


def test_the_parser_gets_the_checkpoints_weights(tmp_path: Path, trtllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that it reads, run in ONNX Runtime, against transformers' model of the Hugging Face checkpoint."""
    case = Case("half", "llama", (4, 2, HEAD_DIM), HIDDEN, True, torch.float16, config={"num_hidden_layers": LAYERS})
    model = make_target(case, tmp_path / "target")
    parse = trtllm_stand_in.OnnxParser.parse_from_file

    def keep(self: Any, path: str) -> bool:
        shutil.copytree(Path(path).parent, tmp_path / "graph")
        return parse(self, path)

    monkeypatch.setattr(trtllm_stand_in.OnnxParser, "parse_from_file", keep)
    run(build_commands(convert(tmp_path, draft=False))[0], *OPTIONS)
    session = ort.InferenceSession(tmp_path / "graph/target.onnx")
    length, cache = 9, 256
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, length))
    visible = np.tri(length, cache, dtype=bool)
    (logits,) = session.run(
        ["logits"],
        {
            "input_ids": ids,
            "position_ids": np.arange(length)[None],
            "write_index": np.zeros(1, np.int64),
            "logit_rows": np.arange(length)[None],
            "attention_mask": np.where(visible, np.float16(0), np.finfo(np.float16).min)[None, None],
        }
        | {
            each.name: np.zeros((1, 2, cache, HEAD_DIM), np.float16)
            for each in session.get_inputs()
            if "past" in each.name
        },
    )
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits - expected).max() <= 2e-2 * np.abs(expected).max()


def test_a_build_leaves_the_checkpoint_as_it_was(built: Built) -> None:
    for role, names in (
        ("target", {"config.json", "rank0.safetensors"}),
        ("draft", {"config.json", "rank0.safetensors"}),
    ):
        assert {path.name for path in (built.root / "checkpoints" / role).iterdir()} == names


# Calls


@pytest.mark.parametrize(
    ("right", "wrong", "error", "message"),
    [
        ("trt_tensor=tensor)", "tensor=tensor)", TypeError, "unexpected keyword argument 'tensor'"),
        ("mark_output(spec.name, spec.dtype)", "mark_output(spec.name, type=spec.dtype)", TypeError, "'type'"),
        ("mark_output(spec.name, spec.dtype)", 'mark_output(spec.name, "int64")', AssertionError, "would get a cast"),
        ("dim_range=ranges)", "ranges=ranges)", TypeError, "'ranges'"),
        ("parse_from_file(str(path))", 'parse_from_file(str(path), "")', TypeError, "too many positional"),
        ("constant(ids)", "constant(ids, shape=[1])", TypeError, "'shape'"),
        ("network.get_output(i)", "network.get_output()", TypeError, "missing a required argument: 'index'"),
        ("OnnxParser(default_trtnet(), logger.trt_logger)", "OnnxParser(default_trtnet())", TypeError, "'logger'"),
        ("max_draft_len: int, **", "budget: int, **", TypeError, "'budget'"),
        ("config: PretrainedConfig | None = None,", "", TypeError, "unexpected keyword argument 'config'"),
        ("MODEL_MAP[ROLES[_model.role]] = _model", "pass", KeyError, "DDTree"),
        ("graph = lower(graph)", "pass", NotImplementedError, "Unknown layer type"),
        ("import DimRange, Tensor,", "import DimRange, gather_nd, Tensor,", ImportError, "gather_nd"),
        ("default_net()._inputs", "default_net()._input_tensors", AttributeError, "_input_tensors"),
    ],
)
def test_a_wrong_call_is_found(
    built: Built, tmp_path: Path, trtllm: None, right: str, wrong: str, error: type[Exception], message: str
) -> None:
    """The net holds: the module with one thing changed does not get through the stand-in."""
    source = MODEL_FILE.read_text()
    assert right in source
    (tmp_path / "changed.py").write_text(source.replace(right, wrong))
    commands = build_commands(convert_reduced(tmp_path))
    with pytest.raises(error, match=message):
        run_all(commands, model_cls_file=tmp_path / "changed.py")


def run_all(commands: list[str], **changed: Any) -> None:
    for command in commands:
        run(command, *OPTIONS, **changed)


def convert_reduced(root: Path) -> Path:
    """A pair with a table of ids, so that every line of the module runs."""
    target = make_target(
        Case("tiny", "llama", (2, 1, 8), 16, True, torch.bfloat16, config={"num_hidden_layers": 1}), root / "target"
    )
    ids = {"mask_token_id": 1, "target_layer_ids": [0]}
    tensors = {"d2t": torch.arange(40), "t2d": torch.arange(VOCAB) < 40}
    keys = {"draft_vocab_size": 40, "extra_tensors": tensors, "num_target_layers": 1, "target_layer_ids": [0]}
    make_draft(target, root / "draft", layers=1, dflash_config=ids, **keys)
    return convert(root)


# What trtllm-build may not be asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max_draft_len", "1024"), r"^max_draft_len 1024 is out of range \(use --max_draft_len 1 to 1023\)$"),
        (
            ("--max_seq_len", "257"),
            r"^max_seq_len 257 exceeds the target's max_position_embeddings 256 \(use --max_seq_len 256 or less\)$",
        ),
        (
            ("--max_batch_size", "6000"),
            r"^max_batch_size 6000 needs a tensor of 4718592000 elements, TensorRT takes 2147483647 "
            r"\(use --max_batch_size 2730, or a smaller --max_seq_len\)$",
        ),  # 4 heads, 256 rows, 512 slots and the rows again, a sequence
        (("--max_beam_width", "2"), r"^--max_beam_width is not supported by ddtree's models \(leave it out\)$"),
        (("--use_cache", "0"), r"^--kv_cache_type disabled is not supported"),
        (("--gather_context_logits", "1"), r"^--gather_context_logits is not supported"),
        (("--model_cls_name", "DDTreeDraft"), r"is a checkpoint of DDTreeTarget \(use --model_cls_name DDTreeTarget, "),
    ],
)
def test_options_that_cannot_be_are_refused(
    checkpoints: Path, trtllm: None, options: tuple[str, ...], message: str
) -> None:
    before = sorted(checkpoints.rglob("*"))
    with pytest.raises(BuildError, match=message) as caught:
        run(build_commands(checkpoints)[0], *OPTIONS[:2], "--max_seq_len", "256", *options)
    assert "\n" not in str(caught.value)
    assert sorted(checkpoints.rglob("*")) == before


def test_another_tensorrt_llm_is_refused(checkpoints: Path) -> None:
    for version in ("1.1.0", "1.3.0rc20"):
        with (
            installed(version),
            pytest.raises(
                BuildError,
                match=rf"^TensorRT-LLM {version} is not supported \(use 1.2.1, or ddtree build --engine tensorrt\)$",
            ),
        ):
            run(build_commands(checkpoints)[0], *OPTIONS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mapping", {"world_size": 2, "tp_size": 2}, r"world_size 2 is not supported \(one GPU only\)"),
        ("ddtree", {"version": 2}, r"has checkpoint version 2, this ddtree reads 1 \(run ddtree convert again\)"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(
    checkpoints: Path, trtllm: None, key: str, value: Any, message: str
) -> None:
    path = checkpoints / "target/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(BuildError, match=message):
        run(build_commands(checkpoints)[0], *OPTIONS)


def test_a_cut_weight_file_is_refused(checkpoints: Path, trtllm: None) -> None:
    path = checkpoints / "target/rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BuildError, match=r"rank0.safetensors is truncated"):
        run(build_commands(checkpoints)[0], *OPTIONS)
    path.unlink()
    with pytest.raises(BuildError, match=r"has no rank0.safetensors \(run ddtree convert again\)"):
        run(build_commands(checkpoints)[0], *OPTIONS)


# The engine directory


def test_engines_are_collected_into_an_engine_directory(built: Built, tmp_path: Path) -> None:
    collect_engines(built.root / "checkpoints", tmp_path / "engine")
    manifest = Manifest.verify(tmp_path / "engine")
    assert (manifest.engine, manifest.dtype) == ("tensorrt_llm", "bfloat16")
    assert manifest.limits == Limits(max_batch_size=3, max_seq_len=100, max_tree_nodes=BUDGET)
    assert manifest.versions["tensorrt"] == TENSORRT_VERSION
    assert manifest.versions["tensorrt_llm"] == VERSION
    compiled = manifest.compiled
    assert compiled is not None
    assert (compiled.arch, compiled.verify, compiled.prefill_chunk) == (trtllm_stand_in.ARCH, "plugin", 100)
    assert (compiled.target_cache_length, compiled.draft_cache_length) == (256, 256)
    for role in ROLES:
        made = built.root / f"checkpoints/{role}-engine/rank0.engine"
        assert (tmp_path / f"engine/{role}.engine").read_bytes() == made.read_bytes()
    assert manifest.tokenizer_files == ("tokenizer.json", "generation_config.json")
    # Of the models it says what the builder says of the same checkpoints.
    settings: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 100, "max_tree_nodes": BUDGET}
    other = build_engine(built.root / "target", built.root / "draft", tmp_path / "other", **settings)
    assert (manifest.target, manifest.draft, manifest.sources) == (other.target, other.draft, other.sources)


def test_engines_that_do_not_go_together_are_refused(checkpoints: Path, tmp_path: Path, trtllm: None) -> None:
    target, draft = build_commands(checkpoints)

    def rebuild(command: str, role: str, *options: str) -> None:
        shutil.rmtree(checkpoints / f"{role}-engine", ignore_errors=True)
        run(command, *OPTIONS, *options)
        (checkpoints / f"{role}-engine/rank0.engine").write_bytes(role.encode())

    def refused() -> str:
        with pytest.raises(BuildError) as caught:
            collect_engines(checkpoints, tmp_path / "engine")
        assert not (tmp_path / "engine").exists()
        return str(caught.value)

    rebuild(target, "target")
    assert "draft-engine/config.json is missing (run trtllm-build with --output_dir" in refused()
    rebuild(draft, "draft", "--max_batch_size", "4")
    assert refused() == (
        "max_batch_size of the target's engine is 3, of the draft's 4 (give trtllm-build the same options for both)"
    )
    rebuild(draft, "draft")
    path = checkpoints / "draft-engine/config.json"
    content = json.loads(path.read_text())
    content["pretrained_config"]["ddtree"]["sources"][0]["sha256"] = "another"
    path.write_text(json.dumps(content))
    assert "are of different checkpoints (build both again)" in refused()
    path.write_text(json.dumps({"pretrained_config": {"architecture": "LlamaForCausalLM"}}))
    assert "draft-engine is no engine of ddtree's models" in refused()
    rebuild(draft, "draft")
    collect_engines(checkpoints, tmp_path / "engine")
    with pytest.raises(BuildError, match="holds an engine already"):
        collect_engines(checkpoints, tmp_path / "engine")
    collect_engines(checkpoints, tmp_path / "engine", force=True)


# The command


def ddtree(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from ddtree.runtime.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_converts_prints_what_to_run_and_collects(built: Built, tmp_path: Path) -> None:
    checkpoints = tmp_path / "check points"  # a name that a shell would take apart
    done = ddtree(
        "convert", "--target", built.root / "target", "--draft", built.root / "draft", "--output", checkpoints
    )
    assert (done.returncode, done.stderr) == (0, f"wrote {checkpoints}\n")
    assert done.stdout.splitlines() == build_commands(checkpoints)
    with installed():
        for command in done.stdout.splitlines():
            run(command)
    for role in ROLES:
        (checkpoints / f"{role}-engine/rank0.engine").write_bytes(b"engine")
    done = ddtree("convert", "--engines", checkpoints, "--output", tmp_path / "engine")
    assert (done.returncode, done.stdout) == (0, "")
    limits = Manifest.verify(tmp_path / "engine").limits
    assert limits == Limits(max_batch_size=8, max_seq_len=256, max_tree_nodes=255)


def test_the_command_refuses_in_one_line(built: Built, tmp_path: Path) -> None:
    for arguments, message in (
        ((), "ddtree: --target makes checkpoints and --engines collects engines (give one of the two)\n"),
        (
            ("--engines", tmp_path, "--dtype", "float16"),
            "ddtree: --engines has its models and its dtype inside (leave --draft and --dtype out)\n",
        ),
        (("--engines", tmp_path), f"ddtree: {tmp_path} has no checkpoint of a target (make one with ddtree convert)\n"),
    ):
        done = ddtree("convert", "--output", tmp_path / "out", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
