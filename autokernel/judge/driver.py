"""The few calls of the CUDA driver that PyTorch does not offer: memory to share, events, L2. Do not edit. Imports no torch.

They are called by `ctypes`, past torch.cuda, so that nothing that a kernel file replaces in there changes what they do.
"""

import ctypes
from functools import cache

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
PERSISTING_L2_LIMIT = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
NO_PERSISTING_L2 = (215, 801)  # CUDA_ERROR_UNSUPPORTED_LIMIT, CUDA_ERROR_NOT_SUPPORTED: then there is nothing to reset
# Smaller allocations may share a block of memory, which another process would then see whole.
GRANULE = 2 << 20


class CudaFault(RuntimeError):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class Driver:
    """libcuda, for the context that is current in the calling thread."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        # Arguments passed by value need their types; all others are pointers or set below.
        self._library.cuMemAlloc_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        self._library.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
        self._library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), ctypes.c_uint64)
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
        self._library.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
        self._library.cuEventCreate.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
        self._library.cuEventDestroy_v2.argtypes = (ctypes.c_void_p,)
        self._library.cuEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.cuEventElapsedTime.argtypes = (ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p)
        self._library.cuCtxSetLimit.argtypes = (ctypes.c_int, ctypes.c_size_t)

    def allocate(self, size: int) -> int:
        """Address of `size` bytes of memory of their own; `size` must be a multiple of GRANULE."""
        address = ctypes.c_uint64()
        self._check("cuMemAlloc", self._library.cuMemAlloc_v2(ctypes.byref(address), size))
        return address.value

    def free(self, address: int) -> None:
        self._check("cuMemFree", self._library.cuMemFree_v2(address))

    def export(self, address: int) -> bytes:
        """A handle by which another process can open the memory at `address`."""
        handle = _Handle()
        self._check("cuIpcGetMemHandle", self._library.cuIpcGetMemHandle(ctypes.byref(handle), address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address, in this process, of memory that another one exported."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._check("cuIpcOpenMemHandle", self._library.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._check("cuIpcCloseMemHandle", self._library.cuIpcCloseMemHandle(address))

    def synchronize(self) -> None:
        """Wait for all work of this process on the device, whatever its stream."""
        self._check("cuCtxSynchronize", self._library.cuCtxSynchronize())

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._check("cuEventCreate", self._library.cuEventCreate(ctypes.byref(event), 0))
        return event

    def forget(self, event: ctypes.c_void_p) -> None:
        self._check("cuEventDestroy", self._library.cuEventDestroy_v2(event))

    def record(self, event: ctypes.c_void_p, stream: int) -> None:
        self._check("cuEventRecord", self._library.cuEventRecord(event, stream))

    def elapsed_us(self, start: ctypes.c_void_p, stop: ctypes.c_void_p) -> float:
        milliseconds = ctypes.c_float()
        self._check("cuEventElapsedTime", self._library.cuEventElapsedTime(ctypes.byref(milliseconds), start, stop))
        return 1e3 * milliseconds.value

    def reset_l2(self) -> None:
        """Turn lines that were asked to persist in L2 into ordinary ones, and allow no more of them."""
        self._check("cuCtxResetPersistingL2Cache", self._library.cuCtxResetPersistingL2Cache(), NO_PERSISTING_L2)
        self._check("cuCtxSetLimit", self._library.cuCtxSetLimit(PERSISTING_L2_LIMIT, 0), NO_PERSISTING_L2)

    def _check(self, name: str, status: int, allowed: tuple[int, ...] = ()) -> None:
        if status and status not in allowed:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            message = text.value.decode(errors="replace") if text.value else "unknown"
            raise CudaFault(f"CUDA error {status} in {name}: {message}")


@cache
def driver() -> Driver:
    """The driver; OSError where there is none."""
    return Driver()
