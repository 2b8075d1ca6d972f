"""Launches the operations' kernels through cuda-python: on CUDA tensors, or on device addresses.

Nothing here waits for the device, and all memory comes from torch or from the caller, so launches can be captured in a
CUDA graph. The first launch of a source file on a device compiles and loads it: make it before the capture.
"""

import ctypes
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddtree.plugins import nvrtc
from ddtree.plugins.operations import OPERATIONS, Operation

_CUDA_VERSION = 13_000  # of NVRTC: what it makes (PTX 9.0 and cubins) no older driver loads
_OLDEST_MAJOR = 8  # compute capability; build_tree reduces integers over a warp by one instruction, from sm_80 on

_loading = threading.Lock()


def launch(
    operation: Operation,
    inputs: Sequence[Tensor],
    *,
    element_type: torch.dtype | None = None,
    **attributes: int | str,
) -> list[Tensor]:
    """Launches one kernel on torch's current stream of the inputs' device, and returns its outputs.

    Args:
        operation: of the table ``ddtree.plugins.operations``.
        inputs: as the table has them: dtypes, shapes, contiguous, on one device.
        element_type: what T stands for in the table; None: the dtype of the input that has type T.
        attributes: the operation's attributes.

    Returns:
        New tensors, contiguous, as the table has them.

    Raises:
        ValueError, TypeError: an input or an attribute that the table does not allow.
        RuntimeError: CUDA refused the launch.
    """
    device = inputs[0].device
    for spec, tensor in zip(operation.inputs, inputs, strict=True):
        if spec.dtype == "T" and element_type is None:
            element_type = tensor.dtype
        expected = element_type if spec.dtype == "T" else _dtype(spec.dtype)
        if tensor.dtype != expected:
            raise ValueError(f"{spec.name} is {tensor.dtype}, expected {expected}")
        if tensor.device != device:
            raise ValueError(f"{spec.name} is on {tensor.device}, expected {device} like {operation.inputs[0].name}")
        if not tensor.is_contiguous():
            raise ValueError(f"{spec.name} of strides {list(tensor.stride())} is not contiguous (use .contiguous())")
    type_name = str(element_type).removeprefix("torch.") if operation.types else None
    sizes = _sizes(operation.name, tuple(tensor.shape for tensor in inputs), tuple(attributes.items()))
    outputs = [
        torch.empty(shape, dtype=element_type if spec.dtype == "T" else _dtype(spec.dtype), device=device)
        for spec, shape in zip(operation.outputs, operation.output_shapes(sizes), strict=True)
    ]
    with torch.cuda.device(device):
        _make_context_current(torch.cuda.current_device())
        launch_pointers(
            operation,
            type_name,
            sizes,
            [tensor.data_ptr() for tensor in inputs],
            [tensor.data_ptr() for tensor in outputs],
            torch.cuda.current_stream(device).cuda_stream,
        )
    return outputs


def launch_pointers(
    operation: Operation,
    dtype: str | None,
    sizes: SimpleNamespace,
    inputs: Sequence[int],
    outputs: Sequence[int],
    stream: int,
) -> None:
    """Launches one kernel in the thread's current CUDA context.

    Args:
        operation: of the table ``ddtree.plugins.operations``.
        dtype: what T stands for in the table, None where it has no T.
        sizes: from ``operation.sizes``.
        inputs, outputs: device addresses, in the order of the table.
        stream: address of a CUDA stream.

    Raises:
        RuntimeError: CUDA refused the launch.
    """
    kernel = _kernel(int(_call("cuCtxGetCurrent")), operation.source, operation.entry(dtype))
    scalars = operation.scalar_values(sizes)
    # cuda-python takes the values and, beside them, their C types.
    parameters = (
        (*inputs, *scalars, *outputs),
        (
            *(ctypes.c_void_p for _ in inputs),
            *(ctypes.c_int for _ in scalars),
            *(ctypes.c_void_p for _ in outputs),
        ),
    )
    grid = [size(sizes) for size in operation.grid]
    shared_bytes = operation.shared_bytes(sizes)
    _call("cuLaunchKernel", kernel, *grid, 1, operation.block, 1, 1, shared_bytes, stream, parameters, 0)


def device_arch() -> str:
    """Architecture, such as "sm_100", of the GPU whose context is current, else of the first one.

    Raises:
        ImportError: cuda-python is not installed.
        RuntimeError: there is no GPU, or driver or GPU are older than the kernels take.
    """
    _call("cuInit", 0)
    if (serves := _call("cuDriverGetVersion")) < _CUDA_VERSION:
        raise RuntimeError(
            f"the NVIDIA driver serves CUDA {serves // 1000}.{serves % 1000 // 10}, and the kernels need CUDA 13.0 "
            "(update it to R580 or newer)"
        )
    device = _call("cuCtxGetDevice") if int(_call("cuCtxGetCurrent")) else _call("cuDeviceGet", 0)
    attribute = _driver().CUdevice_attribute
    major = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    if major < _OLDEST_MAJOR:
        raise RuntimeError(f"the GPU is sm_{major}{minor}, and the kernels need sm_{_OLDEST_MAJOR}0 or newer")
    return f"sm_{major}{minor}"


@lru_cache(maxsize=4096)
def _sizes(
    operation: str, shapes: tuple[torch.Size, ...], attributes: tuple[tuple[str, int | str], ...]
) -> SimpleNamespace:
    return OPERATIONS[operation].sizes(shapes, **dict(attributes))


@cache
def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


# ---------------------------------------------------------------------------------------------------------------------
# The driver
# ---------------------------------------------------------------------------------------------------------------------


@cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError('cuda.bindings.driver is not installed (pip install "ddtree-trtllm[cuda]")') from error
    return driver


def _call(function: str, *arguments: Any) -> Any:
    driver = _driver()
    status, *results = getattr(driver, function)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function}: {status.name}")
    return results[0] if results else None


def _kernel(context: int, source: str, entry: str) -> Any:
    with _loading:  # once, whichever thread comes first
        return _loaded_kernel(context, source, entry)


@cache
def _loaded_kernel(context: int, source: str, entry: str) -> Any:
    return _call("cuModuleGetFunction", _module(context, source), entry.encode())


@cache
def _module(context: int, source: str) -> Any:  # of the current context, which is the one named
    return _call("cuModuleLoadData", nvrtc.compile_source(source, device_arch()).cubin)


def _make_context_current(device: int) -> None:
    """Launches go to the thread's current context. A thread that has done no work of its own on the device has none:
    torch makes the device's primary context current as late as it can."""
    if int(_call("cuCtxGetCurrent")) == 0:
        _call("cuCtxSetCurrent", _primary_context(device))


@cache
def _primary_context(device: int) -> Any:
    return _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", device))
