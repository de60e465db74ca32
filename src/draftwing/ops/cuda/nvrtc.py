"""CUDA C++ kernels compiled at run time by NVRTC, which torch's CUDA builds bring along, and launched by the driver.

A launch may be programmatic: the kernel comes up while the one before it runs, and waits for it itself.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftwing.files import cache_folder

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # of CUlaunchAttributeID
_MAX_DYNAMIC_SHARED, _SHARED_CARVEOUT = 8, 9  # of CUfunction_attribute
_SYSTEM_SHARED = 1 << 10  # bytes of shared memory that a block has besides its own
ALL_SHARED = 1 << 10  # blocks, for which no multiprocessor has room
_BFLOAT16_MAP, _PROMOTE_256B = 9, 3  # of CUtensorMapDataType, ...L2promotion
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # of CUtensorMapSwizzle, by bytes of a row of a box
TensorMap = ctypes.Array[ctypes.c_uint64]
Arg = Tensor | TensorMap | int | float | None


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class Kernel:
    """A kernel of a `Module`; call it with its arguments: tensors (or None) as pointers, ints as int32."""

    def __init__(self, driver: ctypes.CDLL, handle: ctypes.c_void_p, threads: int, shared: int, programmatic: bool):
        self._driver, self._handle, self._threads, self._shared = driver, handle, threads, shared
        self._programmatic = programmatic

    def __call__(
        self, grid: Sequence[int], *args: Arg, overlap: bool = True, cluster: int = 0, shared: int = 0
    ) -> None:
        """overlap: where the kernel was made programmatic, it comes up while the one before it runs. cluster: blocks
        side by side that are one; 0: what the kernel's source says. shared: bytes of dynamic shared memory, no more
        than the kernel was made with; 0: so many."""
        values: list[ctypes.c_void_p | ctypes.c_int | ctypes.c_float | TensorMap] = []
        for arg in args:
            if isinstance(arg, int):
                values.append(ctypes.c_int(arg))
            elif isinstance(arg, float):
                values.append(ctypes.c_float(arg))
            elif isinstance(arg, ctypes.Array):
                values.append(arg)
            else:
                values.append(ctypes.c_void_p(0 if arg is None else arg.data_ptr()))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = self._config(grid, cluster, self._programmatic and overlap)
        config.shared = shared or self._shared
        # As Triton asks for it: torch.cuda.current_stream() makes an object of Python's first, which takes 10 us.
        config.stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        _check(self._driver, self._driver.cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None))

    def clusters_at_once(self, cluster: int) -> int:
        """Returns how many clusters of so many blocks the device runs at the same time."""
        found, config = ctypes.c_int(), self._config((cluster,), cluster, False)
        _check(
            self._driver,
            self._driver.cuOccupancyMaxActiveClusters(ctypes.byref(found), self._handle, ctypes.byref(config)),
        )
        return found.value

    def _config(self, grid: Sequence[int], cluster: int, programmatic: bool) -> _Config:
        config = _Config(*[*grid, 1, 1][:3], self._threads, 1, 1, self._shared)
        config.attributes, config.count = _attributes(cluster, programmatic)
        return config


@functools.cache  # a launch outside graphs waits for the host; to make them takes 3 us
def _attributes(cluster: int, programmatic: bool) -> tuple[ctypes.Array[_Attribute], int]:
    """Returns those of a launch, which nobody changes, and how many they are."""
    found: list[tuple[int, tuple[int, ...]]] = [(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))] if programmatic else []
    if cluster:  # the query of clusters wants it of one block, too
        found.append((_CLUSTER_DIMENSION, (cluster, 1, 1)))
    made = [_Attribute(id=number, value=(ctypes.c_uint * 16)(*values)) for number, values in found]
    return (_Attribute * len(made))(*made), len(made)


class Module:
    """Compiled source. Raises RuntimeError with the compiler's words if it does not compile."""

    def __init__(self, source: str, options: Sequence[str], device: torch.device) -> None:
        torch.cuda.init()
        capability = torch.cuda.get_device_capability(device)
        self._programmatic = capability[0] >= 9
        image = compile_source(source, options, capability)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor  # bytes
        self._module = ctypes.c_void_p()
        torch.zeros(1, device=device)  # makes the context that the module is loaded into
        with torch.cuda.device(device):
            _check(self._driver, self._driver.cuModuleLoadData(ctypes.byref(self._module), image))

    def kernel(
        self, name: str, threads: int, shared: int = 0, programmatic: bool = True, blocks: int | None = None
    ) -> Kernel:
        """shared: bytes of dynamic shared memory. blocks: how many are to find room on a multiprocessor; what is left
        is L1 cache, where loads on their way land. None: the driver decides, for as many as there could be."""
        handle = ctypes.c_void_p()
        _check(self._driver, self._driver.cuModuleGetFunction(ctypes.byref(handle), self._module, name.encode()))
        if shared > 48 << 10:
            _check(self._driver, self._driver.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared))
        if blocks is not None:
            percent = min(100, -(-100 * blocks * (shared + _SYSTEM_SHARED) // self._shared))
            _check(self._driver, self._driver.cuFuncSetAttribute(handle, _SHARED_CARVEOUT, percent))
        return Kernel(self._driver, handle, threads, shared, programmatic and self._programmatic)


@functools.lru_cache(maxsize=4096)  # a pure function of its arguments, for weights asked for in each launch
def tensor_map(
    address: int, shape: tuple[int, ...], box: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> TensorMap:
    """Returns what the copy engine is told of a tensor in 16 bits, of which it brings boxes to shared memory, or stores
    them from there, in the order of 32-, 64- or 128-byte swizzling. shape, box: the last dimension first; a row of a
    box has 32, 64 or 128 bytes. strides: bytes from one to the next of each dimension but the last, multiples of 16;
    None: of a contiguous tensor."""
    rank = len(shape)
    if strides is None:
        strides = tuple(2 * math.prod(shape[: i + 1]) for i in range(rank - 1))
    room = (ctypes.c_uint64 * 24)()
    skip = -ctypes.addressof(room) % 64 // 8  # the driver wants its 128 bytes aligned to 64
    driver, words, longs = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
    code = driver.cuTensorMapEncodeTiled(
        ctypes.byref(room, skip * 8), _BFLOAT16_MAP, rank, ctypes.c_void_p(address), longs(*shape), longs(*strides),
        words(*box), words(*[1] * rank), 0, _SWIZZLES[2 * box[0]], _PROMOTE_256B, 0,
    )  # fmt: skip
    _check(driver, code)
    return (ctypes.c_uint64 * 16)(*room[skip : skip + 16])


def _check(driver: ctypes.CDLL, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'?').decode()} (error {code})")


def compile_source(source: str, options: Sequence[str], capability: tuple[int, int]) -> bytes:
    """Returns the compiled image, from the user's cache folder where this was compiled before. Needs no device. Raises
    as `Module` does, and OSError without NVRTC."""
    nvrtc, (major, minor) = library(), capability
    arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")  # "a": with the instructions of warp groups
    return _compile_cached(nvrtc, source, [f"--gpu-architecture={arch}", "--std=c++17", *options])


def _compile_cached(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256("\0".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()[:32]
    folder = cache_folder() / "kernels"
    file = folder / f"{key}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        image = _compile(nvrtc, source, options)
    try:  # written whole and then renamed, since another process may do the same
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as out:
            out.write(image)
        os.replace(out.name, file)
    except OSError:
        pass  # a read-only home costs a compilation at each start
    return image


def _compile(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"draftwing.cu", 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), words):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def library() -> ctypes.CDLL:
    """Raises OSError where there is none."""
    version = (torch.version.cuda or "13").split(".")[0]
    places = [f"libnvrtc.so.{version}"]
    for root in (Path(torch.__file__).parents[1], Path("/usr/local/cuda")):
        places += glob.glob(f"{root}/nvidia/*/lib/libnvrtc.so.{version}") + glob.glob(
            f"{root}/lib64/libnvrtc.so.{version}"
        )
    for place in places:
        # It looks for its builtins by name, which finds them once they are loaded.
        for builtins in glob.glob(str(Path(place).parent / "libnvrtc-builtins.so.*")) if "/" in place else ():
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise OSError(f"libnvrtc.so.{version} was not found next to torch; install nvidia-cuda-nvrtc")
