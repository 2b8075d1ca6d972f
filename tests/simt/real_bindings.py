"""A program: encodes a tree on "CUDA" through the real cuda-python, over a libcuda of our own (libcuda.cpp), which
gives the CPU runner the parameters as a driver gets them. Prints "as on the CPU" if the result is the CPU path's.
"""

import ctypes
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from simt.driver import STREAM, pointer_or_int
from simt.runner import COMPILER, build

from ddtree.plugins import launch, nvrtc, reference
from ddtree.plugins.operations import ENCODE_TREE

LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)


@LAUNCH
def run(source, entry, sizes, stream, parameters):
    """Reads each parameter by the type that the kernel has there."""
    kinds = [ctypes.c_void_p] * len(ENCODE_TREE.inputs) + [ctypes.c_int] * len(ENCODE_TREE.scalars)
    kinds += [ctypes.c_void_p] * len(ENCODE_TREE.outputs)
    values = [ctypes.cast(parameters[at], ctypes.POINTER(kind))[0] for at, kind in enumerate(kinds)]
    assert stream == STREAM
    build(source.decode()).launch(
        entry.decode(),
        grid=tuple(sizes[:3]),
        block=tuple(sizes[3:6]),
        shared_bytes=sizes[6],
        args=[pointer_or_int(value or 0, kind) for value, kind in zip(values, kinds, strict=True)],
    )
    return 0


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    library = folder / "libcuda.so.1"
    source = Path(__file__).parent / "libcuda.cpp"
    command = [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    # Loaded under this name, it is what the bindings find.
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL).stand_in_on_launch(run)
    nvrtc.compile_source = lambda source, arch: SimpleNamespace(cubin={"sm_90": source.encode()}[arch])
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=STREAM)

    tree = reference.build_tree(torch.randn(2, 4, 30), torch.arange(2), budget=40)
    past = torch.tensor([3, 9])
    expected = reference.encode_tree(tree, past, past, 61, torch.float16, window=5)
    inputs = [tree.depths, tree.ancestor_mask, past, past]
    for _ in range(2):
        results = launch.launch(ENCODE_TREE, inputs, element_type=torch.float16, cache_length=61, window=5)
        if not all(torch.equal(*each) for each in zip(results, expected, strict=True)):
            sys.exit("not what the CPU path gives")
    print("as on the CPU")


if __name__ == "__main__":
    main()
