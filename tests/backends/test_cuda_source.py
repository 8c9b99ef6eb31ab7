"""The copy kernel's CUDA C: compiled for the GPUs it is meant for, and run, thread by thread, on a CPU. Needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtier.storage_backends import cuda_copy
from kvtier.testing.requirements import require_installed


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or []]
    libraries = [path for folder in folders for path in sorted(folder.glob("lib/libnvrtc.so.*"))]
    require_installed(libraries, "pip install nvidia-cuda-nvrtc-cu12")
    return ctypes.CDLL(str(libraries[0]))


def compiled(nvrtc: ctypes.CDLL, source: str, architecture: str) -> tuple[bytes, str]:
    """Machine code, empty where there is none, and what the compiler said."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"copy.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    code = b""
    if not failed:
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        cubin = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetCUBIN(program, cubin) == 0
        code = cubin.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log.value.decode()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_copy_kernel_compiles(nvrtc: ctypes.CDLL, architecture: str) -> None:
    code, log = compiled(nvrtc, cuda_copy.SOURCE, architecture)
    assert code[:4] == b"\x7fELF", log
    assert log == "", "not even a warning"
    assert cuda_copy.KERNEL_NAME.encode() in code, "its name is not mangled"


def test_a_mistake_in_it_would_be_seen(nvrtc: ctypes.CDLL) -> None:
    code, log = compiled(nvrtc, cuda_copy.SOURCE.replace("out[i] = a;", "out[i] = missing;"), "sm_90")
    assert not code
    assert 'identifier "missing" is undefined' in log


ON_A_CPU = """
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index blockIdx, blockDim, gridDim, threadIdx;
#define __global__
#define __launch_bounds__(threads)
%s
extern "C" void run(const unsigned long long* pairs, unsigned long long count, unsigned long long nbytes, unsigned parts,
                    unsigned grid, unsigned threads) {
    gridDim.x = grid;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kvtier_copy(pairs, count, nbytes, parts);
}
"""


@pytest.fixture(scope="module")
def on_a_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    require_installed(compiler, "apt-get install g++")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "copy.cpp").write_text(ON_A_CPU % cuda_copy.SOURCE)
    command = [str(compiler), "-O1", "-w", "-shared", "-fPIC", "-o", "copy.so", "copy.cpp"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    library = ctypes.CDLL(str(folder / "copy.so"))
    library.run.argtypes = [ctypes.c_void_p, *[ctypes.c_ulonglong] * 2, *[ctypes.c_uint] * 3]
    library.run.restype = None
    return library


@pytest.mark.parametrize("nbytes", [16, 4096, 12_288, 100_000, 261_120, 4095, 77])
@pytest.mark.parametrize("count", [1, 3, 64, 100])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_copy_kernel_moves_every_byte_and_no_other(
    on_a_cpu: ctypes.CDLL, nbytes: int, count: int, shift: int, seed: int
) -> None:
    stride = nbytes + 32
    stride += -stride % 16
    source = np.random.default_rng(seed).integers(0, 256, (count, stride), np.uint8)
    into = np.full((count, stride), 7, np.uint8)
    order = np.random.default_rng(seed).permutation(count)
    addresses = [(into[to].ctypes.data + shift, source[at].ctypes.data + shift) for at, to in enumerate(order)]
    pairs = np.array(addresses, np.uint64)
    parts, grid = cuda_copy.kernel_shape(count, nbytes)
    on_a_cpu.run(pairs.ctypes.data, count, nbytes, parts, grid, cuda_copy.THREADS)
    expected = np.full_like(into, 7)
    expected[order, shift : shift + nbytes] = source[:, shift : shift + nbytes]
    assert np.array_equal(into, expected)


def test_the_kernel_spreads_few_pieces_over_many_thread_blocks_and_never_takes_all() -> None:
    sizes = [(count, nbytes) for count in (1, 8, 64, 5000) for nbytes in (64, 262_128)]
    shapes = {size: cuda_copy.kernel_shape(*size) for size in sizes}
    assert all(1 <= grid <= cuda_copy.MOST_THREAD_BLOCKS for _, grid in shapes.values())
    assert shapes[8, 262_128] == (8, 64)
    assert shapes[5000, 64] == (1, 64)
    assert shapes[1, 64] == (1, 1)
