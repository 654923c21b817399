"""Compare results on the GPU: kernels count wrong elements, changed inputs and overwritten guards.

Downloading the whole result of every candidate and case would take longer than timing it. The rules are those of
`CheckCase.error`; if something is wrong, the caller downloads the result, and the host explains it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.toolchain import Compiled
from tilewright.dtypes import DType
from tilewright.runtime.cuda.device import CudaFunction, Device, DeviceMemory
from tilewright.support.fingerprint import fingerprint

_THREADS, _MAX_BLOCKS = 256, 4096
_FILL_THREADS, _FILL_CLOCKS = 1024, 20_000  # some 10 us, within which all blocks of a launch begin
_CODES = {
    DType.F16: 0,
    DType.BF16: 1,
    DType.F32: 2,
    DType.F64: 3,
    DType.I8: 4,
    DType.U8: 5,
    DType.BOOL: 5,
    DType.I32: 6,
    DType.I64: 7,
}

_SOURCE = r"""
typedef unsigned long long u64;
typedef long long i64;

__device__ double element(const void* data, u64 at, u64 code) {
  switch (code) {
    case 0: {
      unsigned short bits = ((const unsigned short*)data)[at];
      float value;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
      return value;
    }
    case 1: return __uint_as_float((unsigned)((const unsigned short*)data)[at] << 16);
    case 2: return ((const float*)data)[at];
    case 3: return ((const double*)data)[at];
    case 4: return ((const signed char*)data)[at];
    case 5: return ((const unsigned char*)data)[at];
    case 6: return ((const int*)data)[at];
    default: return (double)((const i64*)data)[at];
  }
}

__device__ bool is_nan(double x) { return x != x; }
__device__ bool is_finite(double x) { return x - x == 0.0; }

#define EACH(at, size) \
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < (size); at += (u64)gridDim.x * blockDim.x)

// found[0]: wrong elements. squares[0], [1]: of the deviations, and of the reference.
extern "C" __global__ void tw_compare(const void* result, const double* reference, const float* allowed,
    const i64* rows, u64 inner, u64 size, u64 code, u64 spreading, u64* found, double* squares) {
  double off_squares = 0.0, squares_of_reference = 0.0;
  u64 wrong = 0;
  EACH(at, size) {
    u64 from = rows ? (u64)rows[at / inner] * inner + at % inner : at;
    double expected = reference[from], got = element(result, at, code);
    float limit = allowed[from];
    double off = fabs(got - expected);
    if (is_finite(expected)) squares_of_reference += expected * expected;
    if (off <= (double)limit) {
      if (limit - limit == 0.0f) off_squares += off * off;
      continue;
    }
    bool same = got == expected || (is_nan(got) && is_nan(expected)) || (limit == limit && limit - limit != 0.0f)
        || (spreading && !is_finite(got));
    wrong += !same;
  }
  if (wrong) atomicAdd(found, wrong);
  atomicAdd(squares, off_squares);
  atomicAdd(squares + 1, squares_of_reference);
}

extern "C" __global__ void tw_gather(unsigned char* to, const unsigned char* from, const i64* rows, u64 row_bytes,
    u64 size) {
  EACH(at, size) to[at] = from[(u64)rows[at / row_bytes] * row_bytes + at % row_bytes];
}

extern "C" __global__ void tw_differing(const unsigned char* a, const unsigned char* b, u64 size, u64* found) {
  u64 wrong = 0;
  EACH(at, size) wrong += a[at] != b[at];
  if (wrong) atomicAdd(found, wrong);
}

// Loads and stores of lines far apart, which keep memory busy and push everything else out of the caches.
extern "C" __global__ void tw_disturb(u64* data, u64 words, u64 rounds) {
  u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 2654435761ull;
  u64 sum = 0;
  for (u64 round = 0; round < rounds; ++round) {
    at = (at * 6364136223846793005ull + 1442695040888963407ull);
    u64 place = (at >> 20) % words;
    sum += data[place];
    data[place] = sum;
  }
}

// A chain of FMAs in registers: its time follows the clock alone. Nothing is stored; the compiler does not know that.
extern "C" __global__ void tw_reference(float* out, u64 rounds) {
  float value = threadIdx.x;
  for (u64 round = 0; round < rounds; ++round) value = value * 0.999f + 1e-3f;
  if (value < 0.0f) out[0] = value;
}

// What a block finds in shared memory that it has not written is what the last kernel there left: often its own values
// of the last launch, which are right. This fills it all with other bytes. `words`: of a block that takes as much as
// there is, so that each multiprocessor has one; it stays until all have begun.
__device__ void fill(volatile u64* memory, u64 words, u64 pattern) {
  for (u64 at = threadIdx.x; at < words; at += blockDim.x) memory[at] = pattern;
}
extern "C" __global__ void tw_fill_shared(u64 words, u64 pattern, u64 clocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  fill((volatile u64*)shared, words, pattern);
  const i64 begin = clock64();
  while (clock64() - begin < (i64)clocks) {}
}

// table: (address, bytes) of each guard.
extern "C" __global__ void tw_touched(const u64* table, u64 count, u64 byte, u64* found) {
  for (u64 guard = blockIdx.x; guard < count; guard += gridDim.x) {
    const unsigned char* begin = (const unsigned char*)table[2 * guard];
    for (u64 at = threadIdx.x; at < table[2 * guard + 1]; at += blockDim.x)
      if (begin[at] != (unsigned char)byte) atomicAdd(found, 1ull);
  }
}
"""


@lru_cache(maxsize=4)
def gpu_functions(ordinal: int) -> dict[str, CudaFunction]:
    """Tilewright's own kernels for measuring, on one GPU."""
    device = Device(ordinal)
    capability = device.capability
    key = fingerprint("checks", _SOURCE, capability, toolchain.version())
    cache = ObjectCache.default()
    found = cache.get(key)
    if found is None:
        compiled = toolchain.compile_source(_SOURCE, capability)
        cache.put(key, msgspec.msgpack.encode(compiled))
    else:
        compiled = msgspec.msgpack.decode(found, type=Compiled)
    names = ("tw_compare", "tw_gather", "tw_differing", "tw_touched", "tw_disturb", "tw_reference")
    functions = {name: device.load(compiled.cubin, name) for name in names}
    whole = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return {**functions, "tw_fill_shared": device.load(compiled.cubin, "tw_fill_shared", whole)}


class Uploaded:
    """An array on the GPU."""

    def __init__(self, device: Device, values: np.ndarray) -> None:
        dense = np.ascontiguousarray(values)
        self.block: DeviceMemory = device.block(max(dense.nbytes, 1))
        self.bytes = dense.nbytes
        device.upload(self.block.address, dense.ctypes.data, dense.nbytes)
        device.synchronise()  # an upload is complete when the driver has read its source

    @property
    def address(self) -> int:
        return self.block.address


class Checks:
    """The counts since the last `clear`, on one GPU."""

    def __init__(self, ordinal: int) -> None:
        self._device = Device(ordinal)
        self._functions = gpu_functions(ordinal)
        self._counts = self._device.block(6 * 8)

    def clear(self) -> None:
        self._device.fill(self._counts.address, 0, 6 * 8)

    def read(self) -> tuple[int, int, int, float]:
        """(wrong elements, changed input bytes, overwritten guard bytes, relative L2 error)"""
        self._device.synchronise()
        counts = np.zeros(6, np.uint64)
        self._device.download(counts.ctypes.data, self._counts.address, counts.nbytes)
        squares = counts.view(np.float64)
        error = float(np.sqrt(squares[3] / squares[4])) if squares[4] > 0 else float(np.sqrt(squares[3]))
        return int(counts[0]), int(counts[1]), int(counts[2]), error

    def compare(
        self,
        result: int,
        dtype: DType,
        size: int,
        reference: Uploaded,
        allowed: Uploaded,
        rows: tuple[Uploaded, int] | None,
        nan_spreads: bool,
    ) -> None:
        """`rows`: the reference row for each row of the result, and the elements per row."""
        at = self._counts.address
        table, inner = (rows[0].address, rows[1]) if rows is not None else (0, 1)
        values = [
            result,
            reference.address,
            allowed.address,
            table,
            inner,
            size,
            _CODES[dtype],
            int(nan_spreads),
        ]
        self._launch("tw_compare", size, [*values, at, at + 24])

    def gather(self, to: int, few: Uploaded, rows: Uploaded, row_bytes: int, size: int) -> None:
        self._launch("tw_gather", size, [to, few.address, rows.address, row_bytes, size])

    def inputs_differ(self, address: int, given: int, size: int) -> None:
        self._launch("tw_differing", size, [address, given, size, self._counts.address + 8])

    def results_differ(self, address: int, other: int, size: int) -> None:
        self._launch("tw_differing", size, [address, other, size, self._counts.address])

    def guards_touched(self, table: Uploaded, byte: int) -> None:
        count = table.bytes // 16
        function = self._functions["tw_touched"]
        function.launch(max(1, count), _THREADS, [table.address, count, byte, self._counts.address + 16])

    def fill_shared(self, byte: int) -> None:
        """Fill the shared memory of every multiprocessor with such bytes, so that a kernel that reads there before it
        writes computes something else."""
        function = self._functions["tw_fill_shared"]
        blocks = self._device.attribute("MULTIPROCESSOR_COUNT")
        values = [function.shared_bytes // 8, int.from_bytes(bytes([byte] * 8), "little"), _FILL_CLOCKS]
        function.launch(blocks, _FILL_THREADS, values)
        self._device.synchronise()

    def _launch(self, name: str, size: int, values: Sequence[int]) -> None:
        blocks = max(1, min(_MAX_BLOCKS, -(-size // _THREADS)))
        self._functions[name].launch(blocks, _THREADS, values)


class Disturbance:
    """Another kernel on the GPU: next to it, with cold caches, a candidate's loads arrive late and its warps diverge
    in time.

    A missing barrier or wait seldom shows while a kernel has the GPU to itself and its inputs in the cache.
    """

    # Blocks per multiprocessor, and accesses per thread: few enough to leave room for the candidate, and many.
    KINDS = ((1, 400), (4, 100))

    def __init__(self, ordinal: int) -> None:
        self._device = Device(ordinal)
        self._function = gpu_functions(ordinal)["tw_disturb"]
        self._sms = self._device.attribute("MULTIPROCESSOR_COUNT")
        self._bytes = 2 * self._device.attribute("L2_CACHE_SIZE")
        self._data = self._device.block(self._bytes)
        self._stream = self._device.new_stream()

    def begin(self, kind: tuple[int, int]) -> None:
        """Flush the caches with other data, and keep the GPU busy for some 100 us, before a timing."""
        self._device.fill(self._data.address, 0, self._bytes)
        self._device.synchronise()
        blocks, rounds = kind
        values = [self._data.address, self._bytes // 8, rounds]
        self._function.launch(blocks * self._sms, _THREADS, values, self._stream.handle)

    def end(self) -> None:
        self._stream.synchronise()


def guard_table(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(spans, np.uint64).reshape(-1)


assert ctypes.sizeof(ctypes.c_void_p) == 8, "numbers are passed to kernels as pointers"
