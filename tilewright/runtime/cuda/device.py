"""A GPU in this process: memory, modules, launches and attributes.

Everything goes through the CUDA driver API in the primary context, which PyTorch uses too, so both can share tensors.
Driver errors are `DeviceError`s that name the call.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from tilewright.errors import DeviceError, MissingDependencyError


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise MissingDependencyError(
            "a GPU needs the driver's bindings, which are in the extra cuda",
            remedy="pip install 'tilewright[cuda]'",
        ) from None
    return driver


def driver() -> Any:
    """The driver's bindings; MissingDependencyError without them."""
    return _driver()


def checked(call: str, answer: tuple[Any, ...]) -> Any:
    """The results of a driver function, after checking its status."""
    status, *values = answer
    if int(status) != 0:
        raise DeviceError(f"{call}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def count() -> int:
    """The number of GPUs; 0 without a driver."""
    try:
        driver = _driver()
        checked("cuInit", driver.cuInit(0))
        return int(checked("cuDeviceGetCount", driver.cuDeviceGetCount()))
    except (DeviceError, MissingDependencyError, RuntimeError):
        return 0


class Device:
    """One GPU, with its primary context current in the calling thread."""

    def __init__(self, ordinal: int = 0) -> None:
        self._driver = driver = _driver()
        try:
            checked("cuInit", driver.cuInit(0))
        except (DeviceError, RuntimeError) as error:  # no driver, or no visible GPU
            said = str(error).splitlines()[0]
            raise DeviceError(f"this process cannot use a GPU ({said})") from None
        found = checked("cuDeviceGetCount", driver.cuDeviceGetCount())
        if not 0 <= ordinal < found:
            raise DeviceError(f"this machine has {found} GPUs, numbered from 0, got number {ordinal}")
        self.handle = checked("cuDeviceGet", driver.cuDeviceGet(ordinal))
        self._context = checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(self.handle))
        self.enter()

    def enter(self) -> None:
        """Make the context current in this thread."""
        checked("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))

    @property
    def name(self) -> str:
        raw = checked("cuDeviceGetName", self._driver.cuDeviceGetName(128, self.handle))
        return bytes(raw).split(b"\x00", 1)[0].decode()

    @property
    def memory(self) -> int:
        return int(checked("cuDeviceTotalMem", self._driver.cuDeviceTotalMem(self.handle)))

    def attribute(self, name: str) -> int:
        """The value of a `CUdevice_attribute`, named without its prefix: "MULTIPROCESSOR_COUNT"."""
        which = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked("cuDeviceGetAttribute", self._driver.cuDeviceGetAttribute(which, self.handle)))

    @property
    def has_dependent_launch(self) -> bool:
        return self.attribute("COMPUTE_CAPABILITY_MAJOR") >= 9

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def capability(self) -> str:
        """ "sm_90"."""
        return "sm_" + "".join(str(self.attribute(f"COMPUTE_CAPABILITY_{p}")) for p in ("MAJOR", "MINOR"))

    def allocate(self, size: int) -> int:
        return int(checked("cuMemAlloc", self._driver.cuMemAlloc(max(size, 1))))

    def block(self, size: int) -> DeviceMemory:
        """Memory that is freed when nothing refers to it."""
        return DeviceMemory(self, self.allocate(size), size)

    def free(self, address: int) -> None:
        checked("cuMemFree", self._driver.cuMemFree(address))

    def upload(self, address: int, host_address: int, size: int) -> None:
        if size:
            checked("cuMemcpyHtoD", self._driver.cuMemcpyHtoD(address, host_address, size))

    def download(self, host_address: int, address: int, size: int) -> None:
        if size:
            checked("cuMemcpyDtoH", self._driver.cuMemcpyDtoH(host_address, address, size))

    def fill(self, address: int, byte: int, size: int) -> None:
        if size:
            checked("cuMemsetD8", self._driver.cuMemsetD8(address, byte, size))

    def copy_on(self, stream: int, to: int, source: int, size: int) -> None:
        """Copy within the GPU's memory, in stream order."""
        if size and to != source:
            checked("cuMemcpyDtoDAsync", self._driver.cuMemcpyDtoDAsync(to, source, size, stream))

    def upload_on(self, stream: int, address: int, host_address: int, size: int) -> None:
        if size:
            checked("cuMemcpyHtoDAsync", self._driver.cuMemcpyHtoDAsync(address, host_address, size, stream))

    def download_on(self, stream: int, host_address: int, address: int, size: int) -> None:
        if size:
            checked("cuMemcpyDtoHAsync", self._driver.cuMemcpyDtoHAsync(host_address, address, size, stream))

    # -- order --------------------------------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return Stream(self._driver, checked("cuStreamCreate", self._driver.cuStreamCreate(flags)))

    def new_event(self, timing: bool = False) -> CudaEvent:
        flags = self._driver.CUevent_flags
        which = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        return CudaEvent(self._driver, checked("cuEventCreate", self._driver.cuEventCreate(which.value)))

    def synchronise_stream(self, stream: int) -> None:
        checked("cuStreamSynchronize", self._driver.cuStreamSynchronize(stream))

    # -- kernels ------------------------------------------------------------------------------------------------------

    def load(self, cubin: bytes, symbol: str, shared_bytes: int = 0) -> CudaFunction:
        """The kernel `symbol` of machine code or PTX, with this much dynamic shared memory allowed."""
        module = self._module(cubin)
        handle = checked("cuModuleGetFunction", self._driver.cuModuleGetFunction(module, symbol.encode()))
        if shared_bytes > _UNASKED:
            which = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked("cuFuncSetAttribute", self._driver.cuFuncSetAttribute(handle, which, shared_bytes))
        return CudaFunction(self._driver, module, handle, shared_bytes)

    def _module(self, code: bytes) -> Any:
        status, module = self._driver.cuModuleLoadData(code)
        if status == self._driver.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
            raise DeviceError(
                f"the driver of {self.name} is too old for this model's kernels",
                remedy="update the driver, or compile the model with an older NVRTC",
            )
        return checked("cuModuleLoadData", (status, module))

    def synchronise(self) -> None:
        checked("cuCtxSynchronize", self._driver.cuCtxSynchronize())


class DeviceMemory:
    """Memory of a GPU."""

    def __init__(self, device: Device, address: int, size: int) -> None:
        self._device, self.address, self.size = device, address, size

    def __del__(self) -> None:
        # At interpreter exit the driver may already be unloaded, and frees everything itself.
        with contextlib.suppress(DeviceError, TypeError, AttributeError):
            self._device.enter()
            self._device.free(self.address)


class Stream:
    """A stream of Tilewright's own: its work waits for no other stream."""

    def __init__(self, driver: Any, stream: Any) -> None:
        self._driver, self._stream = driver, stream
        self.handle = int(stream)

    def synchronise(self) -> None:
        checked("cuStreamSynchronize", self._driver.cuStreamSynchronize(self._stream))

    @contextlib.contextmanager
    def capture(self) -> Iterator[CapturedGraph]:
        """Record the work started in this stream as a graph instead of running it."""
        driver = self._driver
        graph = CapturedGraph(driver)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked("cuStreamBeginCapture", driver.cuStreamBeginCapture(self._stream, mode))
        try:
            yield graph
        except BaseException:
            driver.cuStreamEndCapture(self._stream)
            raise
        graph.take(checked("cuStreamEndCapture", driver.cuStreamEndCapture(self._stream)))

    def __del__(self) -> None:
        if self._driver is not None:
            self._driver.cuStreamDestroy(self._stream)


class CapturedGraph:
    """Work recorded once, launched as a whole."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._graph: Any = None
        self._executable: Any = None

    def take(self, graph: Any) -> None:
        self._graph = graph
        self._executable = checked("cuGraphInstantiate", self._driver.cuGraphInstantiate(graph, 0))

    def launch(self, stream: int) -> None:
        checked("cuGraphLaunch", self._driver.cuGraphLaunch(self._executable, stream))

    def __del__(self) -> None:
        if self._driver is not None and self._executable is not None:
            self._driver.cuGraphExecDestroy(self._executable)
            self._driver.cuGraphDestroy(self._graph)


class CudaEvent:
    """A point in the order of a stream."""

    def __init__(self, driver: Any, event: Any) -> None:
        self._driver, self._event = driver, event

    def record(self, stream: int) -> None:
        checked("cuEventRecord", self._driver.cuEventRecord(self._event, stream))

    def wait(self, stream: int) -> None:
        """Make later work of `stream` wait for it."""
        checked("cuStreamWaitEvent", self._driver.cuStreamWaitEvent(stream, self._event, 0))

    def seconds_to(self, other: CudaEvent) -> float:
        """Seconds between two events that have both completed."""
        return 1e-3 * float(
            checked("cuEventElapsedTime", self._driver.cuEventElapsedTime(self._event, other._event))
        )

    def __del__(self) -> None:
        if self._driver is not None:
            self._driver.cuEventDestroy(self._event)


# Dynamic shared memory that needs no opt-in: 48 KB including the kernel's static memory.
_UNASKED = 40 << 10
_MAP_ALIGNMENT = 128


def _with_maps(addresses: Sequence[int], maps: Sequence[bytes]) -> tuple[object, int]:
    """The arguments of a launch in memory, which the caller keeps until it is made, and the address of the array of
    their addresses. Tensor maps are aligned as the driver wants them."""
    size = sum(map(len, maps))
    memory = (ctypes.c_uint8 * (size + _MAP_ALIGNMENT))()
    slots = (ctypes.c_uint64 * len(addresses))(*addresses)
    at = ctypes.addressof(memory) + -ctypes.addressof(memory) % _MAP_ALIGNMENT
    places = [ctypes.addressof(slots) + 8 * number for number in range(len(addresses))]
    for each in maps:
        ctypes.memmove(at, each, len(each))
        places.append(at)
        at += len(each)
    pointers = (ctypes.c_void_p * len(places))(*places)
    return (memory, slots, pointers), ctypes.addressof(pointers)


class CudaFunction:
    """A loaded kernel; its module stays loaded as long as it is referenced."""

    def __init__(self, driver: Any, module: Any, handle: Any, shared_bytes: int) -> None:
        self._driver, self._module, self._handle = driver, module, handle
        self.shared_bytes = shared_bytes

    def launch(
        self,
        blocks: int,
        threads: int,
        addresses: Sequence[int],
        stream: int = 0,
        *,
        dependent: bool = False,
        maps: Sequence[bytes] = (),
    ) -> None:
        """`dependent`: it may start while the previous kernel in the stream still runs, and waits for its end
        itself. `maps`: encoded tensor maps, which it takes behind the addresses."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, driver.CUstream(stream)
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        if maps:
            held, parameters = _with_maps(addresses, maps)
            checked("cuLaunchKernelEx", driver.cuLaunchKernelEx(config, self._handle, parameters, 0))
            del held
            return
        values = tuple(addresses)
        kinds = (ctypes.c_void_p,) * len(values)
        checked("cuLaunchKernelEx", driver.cuLaunchKernelEx(config, self._handle, (values, kinds), 0))

    def launch_grid(self, grid: tuple[int, int, int], threads: int, parameters: int, stream: int = 0) -> None:
        """`parameters`: the address of an array with the address of each argument. Nothing is converted on the way."""
        driver = self._driver
        answer = driver.cuLaunchKernel(
            self._handle, *grid, threads, 1, 1, self.shared_bytes, stream, parameters, 0
        )
        checked("cuLaunchKernel", answer)

    def __del__(self) -> None:
        # At interpreter exit the driver may already be unloaded, and frees everything itself.
        if self._driver is not None:
            self._driver.cuModuleUnload(self._module)
