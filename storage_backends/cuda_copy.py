"""Copies between a device's memory and the host's, beside the device's computation; and page-locked host memory.

`CopyQueue` is all that the HBM medium knows of a device: two streams of copies, one per direction, and fences between them
and the stream that computes. `CudaQueue` is CUDA's, through CuPy, which is imported only here and only when needed.

Large pieces go one by one through the copy engines (``cudaMemcpyAsync``: nothing is faster, and no multiprocessor is
taken from the computation). For pieces below `KERNEL_BYTES` the launch of each would cost more than its bytes: there one
kernel moves them all, reading and writing page-locked host memory directly. See docs/design/0011.
"""

from __future__ import annotations

import bisect
import enum
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvtier.errors import ConfigError, MediumError

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

KERNEL_BYTES = 256 << 10
"""Pieces smaller than this are moved by the kernel."""
THREADS = 256
"""Threads of a thread block of the kernel."""
MOST_THREAD_BLOCKS = 64
"""Enough loads in flight for the fastest PCIe, and few enough to leave most multiprocessors to the computation."""
_HOST_REGISTER_PORTABLE_MAPPED = 0x01 | 0x02

KERNEL_NAME = "kvtier_copy"
SOURCE = r"""
// pairs: (to, from) addresses of `count` pieces of `nbytes` each; a piece is cut into `parts`, which thread blocks take in turn.
extern "C" __global__ void __launch_bounds__(256)
kvtier_copy(const unsigned long long* pairs, unsigned long long count, unsigned long long nbytes, unsigned int parts)
{
    for (unsigned long long job = blockIdx.x; job < count * parts; job += gridDim.x) {
        const unsigned long long to = pairs[2 * (job / parts)];
        const unsigned long long from = pairs[2 * (job / parts) + 1];
        const unsigned long long step = (unsigned long long)parts * blockDim.x;
        unsigned long long i = (job % parts) * blockDim.x + threadIdx.x;
        if (((to | from | nbytes) & 15) == 0) {
            uint4* out = reinterpret_cast<uint4*>(to);
            const uint4* in = reinterpret_cast<const uint4*>(from);
            const unsigned long long words = nbytes / 16;
            for (; i + 3 * step < words; i += 4 * step) {
                const uint4 a = in[i], b = in[i + step], c = in[i + 2 * step], d = in[i + 3 * step];
                out[i] = a;
                out[i + step] = b;
                out[i + 2 * step] = c;
                out[i + 3 * step] = d;
            }
            for (; i < words; i += step) out[i] = in[i];
        } else {
            for (; i < nbytes; i += step) reinterpret_cast<char*>(to)[i] = reinterpret_cast<const char*>(from)[i];
        }
    }
}
"""
"""CUDA C of the kernel. Every access is 16 bytes wide where addresses and size allow it, four of them in flight per thread."""

Kernel: TypeAlias = Callable[..., None]
Pairs: TypeAlias = Sequence[tuple[int, int]]
"""(destination, source) addresses of pieces of one size; one of the two is on the device."""


class Way(enum.Enum):
    """Direction of a copy. Each has a stream of its own, so that loads do not queue behind saves."""

    TO_HOST = 2
    """A save; the value is ``cudaMemcpyDeviceToHost``."""
    TO_DEVICE = 1
    """A load; the value is ``cudaMemcpyHostToDevice``."""


class Mark(ABC):
    """A point in a stream: a fence for whoever comes after it. Holds what the work before it needs."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until everything before the mark has happened."""

    @abstractmethod
    def hold_compute(self) -> None:
        """Let what the calling thread queues for computation from now on start only behind the mark; does not block."""


class CopyQueue(ABC):
    """Streams of copies beside the stream that computes. Thread-safe. Raises ``MediumError`` for the device's faults."""

    @abstractmethod
    def fence(self) -> Mark:
        """A mark behind everything that the calling thread has queued for computation."""

    @abstractmethod
    def copy(self, way: Way, pairs: Pairs, nbytes: int) -> Mark:
        """Queue the copy of one piece of ``nbytes`` per pair, waiting for no computation; the mark is behind it.

        Both sides stay as they are until the mark has been waited for. Where this raises, nothing is under way.
        """


class CudaMark(Mark):
    """An event. Blocking: a thread that waits leaves its core to others."""

    def __init__(self, cuda: Any, device: torch.device, stream: int, kept: object = None) -> None:  # noqa: ANN401 - CuPy ships no types
        self._cuda, self._device, self._kept = cuda, device, kept
        self._event = cuda.Event(block=True, disable_timing=True)
        cuda.runtime.eventRecord(self._event.ptr, stream)

    def wait(self) -> None:
        with _translated():
            self._event.synchronize()

    def hold_compute(self) -> None:
        with _translated():
            self._cuda.runtime.streamWaitEvent(_compute_stream(self._device), self._event.ptr)


class CudaQueue(CopyQueue):
    """CUDA's copy engines and, for small pieces of page-locked memory, a kernel."""

    def __init__(self, device: torch.device) -> None:
        """``device`` has an index. Raises ``ConfigError`` where CuPy is missing or finds no device."""
        self._cupy = import_cupy()
        self._cuda = self._cupy.cuda
        self._device = device
        with _translated():
            self._cuda.runtime.setDevice(device.index)
            # non_blocking: torch computes on the legacy default stream, which any other kind of stream would wait for
            self._streams = {way: self._cuda.Stream(non_blocking=True) for way in Way}
            direct = self._cuda.runtime.deviceGetAttribute(
                self._cuda.runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, device.index
            )
        self._kernel = self._compiled() if direct else None

    def fence(self) -> Mark:
        with _translated():
            self._cuda.runtime.setDevice(self._device.index)
            return CudaMark(self._cuda, self._device, _compute_stream(self._device))

    def copy(self, way: Way, pairs: Pairs, nbytes: int) -> Mark:
        stream = self._streams[way]
        with _translated():
            self._cuda.runtime.setDevice(self._device.index)  # of this thread, which is any transfer thread
            try:
                kept = None
                if self._kernel is not None and nbytes < KERNEL_BYTES and self._mapped(way, pairs, nbytes):
                    kept = self._launch(self._kernel, stream, pairs, nbytes)
                else:
                    for to, source in pairs:
                        self._cuda.runtime.memcpyAsync(to, source, nbytes, way.value, stream.ptr)
                return CudaMark(self._cuda, self._device, stream.ptr, kept)
            except BaseException:
                stream.synchronize()
                raise

    def _mapped(self, way: Way, pairs: Pairs, nbytes: int) -> bool:
        host = 0 if way is Way.TO_HOST else 1
        return all(pinned.covers(pair[host], nbytes) for pair in pairs)

    def _launch(self, kernel: Kernel, stream: Any, pairs: Pairs, nbytes: int) -> object:  # noqa: ANN401 - CuPy ships no types
        """Queue the kernel; gives what has to live until it has run."""
        table = self._cuda.alloc_pinned_memory(16 * len(pairs))
        np.frombuffer(table, np.uint64, 2 * len(pairs))[:] = np.array(pairs, np.uint64).ravel()
        parts, grid = kernel_shape(len(pairs), nbytes)
        arguments = (np.uint64(table.ptr), np.uint64(len(pairs)), np.uint64(nbytes), np.uint32(parts))
        with stream:
            kernel((grid,), (THREADS,), arguments)
        return table

    def _compiled(self) -> Kernel | None:
        kernel = self._cupy.RawKernel(SOURCE, KERNEL_NAME)
        try:
            kernel.compile()
        except Exception as error:  # noqa: BLE001 - of NVRTC, of the driver, or of what CuPy cannot find
            _log.warning("small blocks are copied one by one: the copy kernel does not compile here: %s", error)
            return None
        return kernel  # type: ignore[no-any-return]  # CuPy ships no types


def kernel_shape(count: int, nbytes: int) -> tuple[int, int]:
    """(parts, thread blocks) for ``count`` pieces of ``nbytes``: a part is worth a thread block's four wide accesses at least."""
    parts = max(1, min(MOST_THREAD_BLOCKS // count, nbytes // (64 * THREADS)))
    return parts, min(MOST_THREAD_BLOCKS, count * parts)


class PinnedMemory:
    """Ranges of host memory that this process has page-locked for CUDA. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock whole pages and map them for every device. Raises ``MediumError`` where the system does not allow it."""
        cupy = import_cupy()
        with _translated():
            cupy.cuda.runtime.hostRegister(address, nbytes, _HOST_REGISTER_PORTABLE_MAPPED)
        with self._lock:
            at = bisect.bisect(self._starts, address)
            self._starts.insert(at, address)
            self._ends.insert(at, address + nbytes)

    def unpin(self, address: int) -> None:
        """Take back what ``pin`` was given at ``address``. No copy may be under way."""
        with self._lock:
            at = self._starts.index(address)
            del self._starts[at], self._ends[at]
        with _translated():
            import_cupy().cuda.runtime.hostUnregister(address)

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in one page-locked range."""
        with self._lock:
            at = bisect.bisect(self._starts, address) - 1
            return at >= 0 and address + nbytes <= self._ends[at]


pinned = PinnedMemory()
"""Of this process."""


def import_cupy() -> Any:  # noqa: ANN401 - CuPy ships no types
    """CuPy, where it is installed and sees a device. Raises ``ConfigError`` saying what is missing."""
    try:
        import cupy  # noqa: PLC0415 - an optional package that takes a second to import

        runtime = cupy.cuda.runtime
    except (ImportError, AttributeError) as error:  # no attributes: a folder that some removal has left behind
        raise ConfigError(f"CuPy is missing ({error}); run: pip install 'kvtier[cuda]'") from None
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ConfigError(f"CUDA finds no device: {error}") from None
    if not count:
        raise ConfigError("CUDA finds no device")
    return cupy


def device_count() -> int:
    """CUDA devices that copies can reach; 0 also where CuPy is missing."""
    try:
        return int(import_cupy().cuda.runtime.getDeviceCount())
    except ConfigError:
        return 0


def _compute_stream(device: torch.device) -> int:
    import torch  # noqa: PLC0415 - whoever has a device has loaded it already; DRAM alone needs none

    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # CuPy's CUDARuntimeError, CUDADriverError and torch's errors
        raise MediumError(f"CUDA: {error}") from error
