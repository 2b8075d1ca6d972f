"""Launching: what the driver is told, once it has loaded the code; and that the real driver's bindings take it."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver as real
from simt.driver import COMPUTE_CAPABILITY, STREAM, Driver, install

from ddtree.plugins import custom_ops, launch, nvrtc, ops
from ddtree.plugins.operations import DRAFT_TOPK, ENCODE_TREE, GATHER_FEATURES

POINTER, INT = ctypes.c_void_p, ctypes.c_int


@pytest.fixture
def driver(monkeypatch):
    """Records, and runs nothing: these tests are about the calls."""
    driver = Driver(runs=False)
    install(monkeypatch, driver)
    return driver


def tensors(operation, **shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Inputs of an operation; T is float16."""
    return [
        torch.zeros(shapes[spec.name], dtype=torch.float16 if spec.dtype == "T" else getattr(torch, spec.dtype))
        for spec in operation.inputs
    ]


def encode_inputs(batch: int = 2, nodes: int = 40) -> list[torch.Tensor]:
    shapes = {"depths": (batch, nodes), "ancestor_mask": (batch, nodes, -(-nodes // 32))}
    return tensors(ENCODE_TREE, **shapes, root_positions=(batch,), past_lengths=(batch,))


def test_the_driver_gets_grid_block_stream_and_parameters_in_order(driver):
    inputs = encode_inputs()
    outputs = launch.launch(ENCODE_TREE, inputs, element_type=torch.bfloat16, cache_length=100, window=7)
    (call,) = driver.launches
    assert call.entry == "ddtree_encode_tree_bfloat16"
    assert (call.grid, call.block, call.shared_bytes, call.stream) == ((40, 2, 1), (256, 1, 1), 0, STREAM)
    # depths, ancestor_mask, root_positions, past_lengths, N, W, cache_length, window, position_ids, attention_mask
    assert call.types == (POINTER,) * 4 + (INT,) * 4 + (POINTER,) * 2
    addresses = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    assert call.values == (*addresses[:4], 40, 2, 100, 7, *addresses[4:])


def test_outputs_are_new_tensors_of_the_table(driver):
    position_ids, attention_mask = launch.launch(
        ENCODE_TREE, encode_inputs(), element_type=torch.float32, cache_length=100, window=0
    )
    assert (position_ids.shape, position_ids.dtype) == ((2, 40), torch.int64)
    assert (attention_mask.shape, attention_mask.dtype) == ((2, 1, 40, 100), torch.float32)


def test_an_empty_tensor_is_a_null_pointer_and_a_word_its_number(driver):
    logits = torch.zeros(2, 3, 9)
    launch.launch(DRAFT_TOPK, [logits, torch.zeros(0, dtype=torch.int32)], k=4)
    (call,) = driver.launches
    assert call.values[:6] == (logits.data_ptr(), 0, 3, 9, 4, 0)
    assert call.grid == (6, 1, 1)


def test_code_is_loaded_once_a_device_and_source(driver):
    def encode(dtype):
        launch.launch(ENCODE_TREE, encode_inputs(), element_type=dtype, cache_length=64, window=0)

    def gather():
        shapes = {"features": (2, 3, 4), "accepted_nodes": (2, 3), "accepted_count": (2,)}
        launch.launch(GATHER_FEATURES, tensors(GATHER_FEATURES, **shapes), row_bytes=4)

    for _ in range(2):
        encode(torch.float16), encode(torch.float32), gather()
    assert driver.loaded == [b"encode_tree.cu", b"commit.cu"]
    driver.context = 0xC1  # another device
    encode(torch.float16)
    assert driver.loaded == [b"encode_tree.cu", b"commit.cu", b"encode_tree.cu"]


def test_threads_that_meet_at_the_first_launch_load_once(driver, monkeypatch):
    together = threading.Barrier(4)
    load = driver.cuModuleLoadData
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda image: (threading.Event().wait(0.05), load(image))[1])
    inputs = encode_inputs()

    def work() -> None:
        together.wait()
        launch.launch(ENCODE_TREE, inputs, element_type=torch.float16, cache_length=64, window=0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.loaded == [b"encode_tree.cu"]
    assert len(driver.launches) == 4


def test_the_devices_own_architecture_is_compiled_and_its_cubin_loaded(driver, monkeypatch):
    asked = []

    def compile_source(source, arch):
        asked.append((source, arch))
        return nvrtc.Compiled(ptx=b"ptx", cubin=b"\x7fELF", log="")

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    launch.launch(ENCODE_TREE, encode_inputs(), element_type=torch.float16, cache_length=64, window=0)
    assert asked == [("encode_tree.cu", "sm_{}{}".format(*COMPUTE_CAPABILITY))]
    assert driver.loaded == [b"\x7fELF"]


@pytest.mark.parametrize(
    ("version", "capability", "message"),
    [
        (
            12_080,
            (9, 0),
            r"the NVIDIA driver serves CUDA 12\.8, and the kernels need CUDA 13\.0 \(update it to R",
        ),
        (13_000, (7, 5), "the GPU is sm_75, and the kernels need sm_80 or newer"),
    ],
)
def test_an_older_driver_or_gpu_is_refused_before_anything_is_compiled(
    driver, monkeypatch, version, capability, message
):
    driver.version, driver.compute_capability = version, capability
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled"))
    with pytest.raises(RuntimeError, match=message) as raised:
        launch.launch(ENCODE_TREE, encode_inputs(), element_type=torch.float16, cache_length=64, window=0)
    assert "\n" not in str(raised.value)
    assert driver.launches == []


@pytest.mark.parametrize(("version", "capability"), [(13_000, (8, 0)), (13_020, (12, 0))])
def test_drivers_and_gpus_from_the_oldest_on_are_served(driver, version, capability):
    driver.version, driver.compute_capability = version, capability
    assert launch.device_arch() == "sm_{}{}".format(*capability)


def test_a_thread_without_a_context_gets_the_primary_one(driver):
    assert driver.context == 0
    launch.launch(ENCODE_TREE, encode_inputs(), element_type=torch.float16, cache_length=64, window=0)
    assert driver.context == 0xC0
    driver.context = 0xAB  # somebody's own: left alone
    launch.launch(ENCODE_TREE, encode_inputs(), element_type=torch.float16, cache_length=64, window=0)
    assert driver.context == 0xAB


def test_a_refused_launch_is_an_error_that_names_the_call(driver, monkeypatch):
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *_: (real.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,))
    with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        launch.launch(ENCODE_TREE, encode_inputs(), element_type=torch.float16, cache_length=64, window=0)


def test_wrong_inputs_are_refused_before_any_launch(driver):
    def encode(**changed):
        inputs = dict(zip([spec.name for spec in ENCODE_TREE.inputs], encode_inputs(), strict=True)) | changed
        launch.launch(ENCODE_TREE, [*inputs.values()], element_type=torch.float16, cache_length=64, window=0)

    with pytest.raises(ValueError, match=r"depths is torch\.int64, expected torch\.int32"):
        encode(depths=torch.zeros(2, 40, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"depths of strides \[1, 2\] is not contiguous"):
        encode(depths=torch.zeros(40, 2, dtype=torch.int32).T)
    with pytest.raises(ValueError, match="past_lengths is on meta, expected cpu like depths"):
        encode(past_lengths=torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match=r"past_lengths has shape \[3\]"):
        encode(past_lengths=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="encode_tree of float64"):
        launch.launch(ENCODE_TREE, encode_inputs(), element_type=torch.float64, cache_length=64, window=0)
    assert driver.launches == []


def test_ops_refuse_what_kernels_cannot_do_before_any_launch(driver):
    with pytest.raises(ValueError, match="budget 1024 exceeds the 1023 draft nodes of the CUDA kernel"):
        ops.build_tree(torch.zeros(1, 2, 3000), torch.zeros(1, dtype=torch.int32), budget=1024)
    cache = torch.zeros(1, 2, 8, 16)
    nodes = torch.zeros(1, 3, dtype=torch.int32)
    verified = ops.Verified(nodes, nodes[:, 0], nodes, nodes.float(), nodes[:, 0])
    with pytest.raises(ValueError, match=r"value cache of layer 1 has strides \[256, 128, 1, 8\]: not contiguous"):
        ops.commit([(cache, cache), (cache, cache.mT.contiguous().mT)], torch.tensor([1]), verified)
    with pytest.raises(ValueError, match="key cache of layer 0 is on meta, expected cpu"):
        custom_ops.commit_paged_cuda([cache.to("meta")], nodes, torch.tensor([1]), nodes, nodes[:, 0])
    assert driver.launches == []


def test_caches_of_one_shape_are_one_launch(driver):
    nodes = torch.zeros(1, 3, dtype=torch.int32)
    verified = ops.Verified(nodes, nodes[:, 0], nodes, nodes.float(), nodes[:, 0])
    full = [(torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)) for _ in range(3)]
    sliding = [(torch.zeros(1, 2, 4, 16, dtype=torch.float16), torch.zeros(1, 2, 4, 16, dtype=torch.float16))]
    for _ in range(2):
        ops.commit([*full[:2], *sliding, *full[2:]], torch.tensor([1]), verified)
    assert [(call.grid, call.values[-4:]) for call in driver.launches] == [
        ((2, 6, 1), (2, 2, 8, 64)),  # D, kv_heads, cache, row_bytes
        ((2, 2, 1), (2, 2, 4, 32)),
    ] * 2
    # The tables of addresses are made once, or a CUDA graph could not hold them.
    assert driver.launches[0].values[0] == driver.launches[2].values[0]


def test_layers_together_are_one_launch_over_each_layer(driver):
    nodes = torch.zeros(1, 3, dtype=torch.int32)
    verified = ops.Verified(nodes, nodes[:, 0], nodes, nodes.float(), nodes[:, 0])
    layers = torch.zeros(2, 3, 4, 2, 8, 16)  # keys and values, layers, slots, kv_heads, cache, head_dim
    addresses = tuple(layers[part, layer].data_ptr() for layer in range(3) for part in range(2))
    ops.commit([(layers[0, :, :1], layers[1, :, :1])], torch.tensor([1]), verified)
    (call,) = driver.launches
    assert (call.grid, call.values[-4:]) == ((2, 6, 1), (2, 2, 8, 64))
    assert (layers.device, addresses) in custom_ops._tables


def test_a_table_of_addresses_cannot_be_made_in_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call it once before the graph's capture"):
        custom_ops._on_device(torch.device("cuda"), (1, 2))


def test_without_a_driver_the_error_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(RuntimeError, match="libcuda"):
        launch.device_arch()


def test_through_the_real_bindings_a_kernel_gets_its_parameters():
    """cuda-python as it is, over a libcuda of our own, in a process of its own."""
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    tests = Path(__file__).parents[1]
    program = [sys.executable, str(tests / "simt" / "real_bindings.py")]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tests)})
    assert done.stdout == "as on the CPU\n", done.stderr
