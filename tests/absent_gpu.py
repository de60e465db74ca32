"""Kernels compiled for GPUs that are not there, up to their shared memory, by a process that interprets none."""

from __future__ import annotations

from pathlib import Path

from forked_scripts import Forks

# Notes what is launched; `empty` makes tensors without data.
BEGIN = """
import importlib, re, sys
import torch
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.runtime import driver
from draftwing.engine.startup.precompile import _Driver, _Nothing
driver.set_active(_Driver(GPUTarget("cuda", int(sys.argv[1]), 32)))
def memory_alone(backend, stages, options, language, capability):
    # What make_llir does first. What follows, LLVM and the assembler, takes half of the time.
    def allocate(module, metadata):
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        version = get_ptx_version_from_options(options, backend.target.arch)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
        manager.run(module, "memory_alone")
        metadata.update(name="", shared=module.get_int_attr("ttg.shared"))
        return ""
    stages["llir"], stages["ptx"], stages["cubin"] = allocate, lambda *_: "", lambda *_: b""
knobs.runtime.add_stages_inspection_hook = memory_alone
launches = []
def note(*, fn, key, compile, **rest):
    launches.append((fn.module, fn.name, compile["specialization_data"]))
    fn.jit_function.device_caches[0][0][key] = _Nothing()
    return True
knobs.runtime.jit_cache_hook = note
def empty(*shape, dtype=torch.int64):
    return torch.empty(*shape, dtype=dtype, device="meta")
half = torch.bfloat16
"""
# Prints shared memory, and the neighbours along a product that a lane holds.
END = """
knobs.runtime.jit_cache_hook = None
for module, name, launch in launches:
    compiled = getattr(importlib.import_module(module), name.rpartition(".")[2]).preload(launch)
    print(compiled.metadata.shared, *sorted(set(re.findall(r"kWidth = (\\d+)", compiled.asm["ttgir"]))))
"""
# Compiles all the way. Prints a kernel's name, how many times a thread multiplies and adds at once, multiplies, and
# adds, and how the elements of a row are shared where they are summed: of a thread, threads of a warp, warps.
ARITHMETIC = """
knobs.runtime.jit_cache_hook = knobs.runtime.add_stages_inspection_hook = None
for module, name, launch in launches:
    name = name.rpartition(".")[2]
    asm = getattr(importlib.import_module(module), name).preload(launch).asm
    counts = [len(re.findall(rf"\\b{what}(?:\\.rn)?\\.(?:f32|bf16)", asm["ptx"])) for what in ("fma", "mul", "add")]
    summed = re.findall(r"\\}\\) : \\(tensor<[^,]*f32, (#\\w+)>\\)", asm["ttgir"])
    layout = re.search(rf"{summed[0]} = (.*)", asm["ttgir"]).group(1) if summed else ""
    print(name, *counts, *re.findall(r"(\\d+)\\](?!\\}>)", layout)[:3])
"""


def compiled(
    forks: Forks, folder: Path, launching: str, capability: int, *args: str, end: str = END
) -> list[list[str]]:
    """What `end` prints of each kernel that the code launches; the code finds `args` from sys.argv[2] on."""
    words = str(capability), *args
    return [line.split() for line in forks.run(BEGIN + launching + end, folder, *words, cache=str(folder / "cache"))]
