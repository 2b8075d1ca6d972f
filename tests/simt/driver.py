"""A stand-in for ``cuda.bindings.driver``, as far as ``ddtree.plugins.launch`` uses it: it records the calls, and runs
the kernels in the CPU runner with exactly the parameters that the driver was given.

With ``install`` the operations' CUDA path runs from end to end on CPU tensors, whose addresses stand for device
addresses. What it cannot show: that the real driver takes the compiled code, and anything about time.
"""

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as real

from ddtree.plugins import launch, nvrtc, ops

from .runner import Kernels, build

STREAM = 0x5EED
COMPUTE_CAPABILITY = (10, 3)


@dataclass(frozen=True)
class Launch:
    """One call of cuLaunchKernel."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    values: tuple[int, ...]
    types: tuple[type, ...]


class Driver:
    """Modules are the names of sources, functions are (source, entry). ``runs`` False: launches are only recorded."""

    version = 13_000
    compute_capability = COMPUTE_CAPABILITY
    CUresult = real.CUresult
    CUdevice_attribute = real.CUdevice_attribute

    def __init__(self, *, runs: bool = True, context: int = 0) -> None:
        self.runs = runs
        self.context = context  # current one of the thread; 0: none
        self.schedule = 0
        self.loaded: list[bytes] = []
        self.launches: list[Launch] = []

    def cuInit(self, flags):  # noqa: N802 (the names are the driver's)
        return (self._success,)

    def cuDriverGetVersion(self):  # noqa: N802
        return self._success, self.version

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return self._success, real.CUdevice(ordinal)

    def cuCtxGetDevice(self):  # noqa: N802
        return (self._success, real.CUdevice(0)) if self.context else (real.CUresult.CUDA_ERROR_INVALID_CONTEXT, None)

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        major, minor = self.compute_capability
        kinds = real.CUdevice_attribute
        values = {
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
        }
        return self._success, values[attribute]

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return self._success, real.CUcontext(0xC0 + int(device))

    def cuCtxGetCurrent(self):  # noqa: N802
        return self._success, real.CUcontext(self.context)

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.context = int(context)
        return (self._success,)

    def cuModuleLoadData(self, image):  # noqa: N802
        if not self.context:
            return real.CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        self.loaded.append(image)
        return self._success, image.decode(errors="replace")

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return self._success, (module, name.decode())

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra):  # noqa: N802
        if not self.context:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if not all(0 < size <= 65535 for size in (gy, gz)) or not 0 < gx < 2**31 or extra != 0:
            return (real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        values, types = parameters
        source, entry = function
        self.launches.append(Launch(entry, (gx, gy, gz), (bx, by, bz), shared_bytes, stream, tuple(values), types))
        if self.runs:
            _kernels(source).launch(
                entry,
                grid=(gx, gy, gz),
                block=(bx, by, bz),
                shared_bytes=shared_bytes,
                args=[pointer_or_int(*each) for each in zip(values, types, strict=True)],
                schedule=self.schedule,
            )
        return (self._success,)

    _success = real.CUresult.CUDA_SUCCESS


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Puts ``driver`` in place of the real one, and of torch.cuda what ``launch`` asks it for. ``ops`` then takes every
    tensor for a CUDA tensor."""

    @contextmanager
    def device(_):
        yield

    monkeypatch.setattr(launch, "_driver", lambda: driver)
    for cached in (launch._loaded_kernel, launch._module, launch._primary_context):
        monkeypatch.setattr(launch, cached.__name__, launch.cache(cached.__wrapped__))
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, arch: SimpleNamespace(cubin=source.encode()))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(ops, "_serve", lambda tensor, operator, kernels: kernels)


@cache
def _kernels(source: str) -> Kernels:
    return build(source)


def pointer_or_int(value: int, kind: type) -> torch.Tensor | int:
    """A parameter as the runner takes it: an int32, or a tensor at the address."""
    if kind is ctypes.c_int:
        return value
    if kind is not ctypes.c_void_p:
        raise TypeError(f"a parameter of type {kind}: kernels take pointers and int32")
    if value == 0:
        return torch.empty(0)
    return torch.frombuffer((ctypes.c_char * 1).from_address(value), dtype=torch.uint8)
