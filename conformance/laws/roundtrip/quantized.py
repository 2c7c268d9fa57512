"""The law on safetensors whose tensors are quantized: a reader of torch gives them dequantized.

``form=blocks``  a matrix ``w`` of codes, of which each square of ``block`` rows and columns has its own scale in ``s``
``form=mxfp4``   as the OCP microscaling formats have it: ``w`` holds two codes of four bits a byte, the lower bits
first, in groups along its last dim, and ``s`` the exponent of each group
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import full

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Folder, Placements, Rank
from shardlaw.conformance.laws.checkpoint.calls import load
from shardlaw.conformance.laws.roundtrip.cases import NEEDS_FILES
from shardlaw.conformance.laws.roundtrip.options import need
from shardlaw.reference.layout import Layout

# of "mxfp4-head" only as many elements of the last dim are asked for as there are groups: all that torch reads of it
Form = Literal["blocks", "mxfp4", "mxfp4-head"]
Codes = Literal["float8_e4m3fn", "float8_e5m2", "int8"]
POISON = 113.0
BIAS = 120  # of the exponents in a file that a case gives: those of E8M0 are counted from 127
SPELLED = {
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
NAMES = {
    "blocks": ("a.weight", "a.weight_scale_inv"),
    "mxfp4": ("a_blocks", "a_scales"),
    "mxfp4-head": ("a_blocks", "a_scales"),
}

QUANTIZED = (
    "mesh=2 w=5x6:-:float32:small s=3x3:-:float32:small to=S(0) block=2",
    "mesh=3 w=7x5:-:float32:small s=3x2:-:float32:small to=S(1) block=3 files=two",
    "mesh=2x2 w=5x7:-:float32:small s=2x2:-:float32:small to=S(0),S(1) block=4 codes=int8 threads=2",
    "mesh=1 w=3x4:-:float32:small s=1x1:-:float32:small to=R codes=float8_e5m2 dtype=bfloat16",
    "mesh=3 w=2x9:-:float32:small s=2x9 to=S(0) block=1 files=two dtype=float16",
    "mesh=2 w=130x4:-:float32:small s=2x1:-:float32:small to=S(0)",
    "mesh=2 w=2x3x2x4:-:uint8 s=2x3x2:-:uint8:small to=S(0) form=mxfp4",
    "mesh=2 w=2x1x3x2:-:uint8:wide s=2x1x3:-:uint8:small to=S(2) form=mxfp4 files=two dtype=bfloat16",
    "mesh=3 w=2x5x3x2:-:uint8:wide s=2x5x3:-:uint8:small to=S(1) form=mxfp4-head",
    "mesh=4 w=2x2x5x1:-:uint8:wide s=2x2x5:-:uint8:small to=S(2) form=mxfp4-head",
    "mesh=2x2 w=3x2x7x1:-:uint8:wide s=3x2x7:-:uint8:small to=S(2),S(1) form=mxfp4-head files=two",
    "mesh=2x2 w=7x9:-:float32:small s=3x3:-:float32:small to=S(1),S(0) block=3 codes=int8",
)


def in_safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """The file of tensors that the format safetensors describes: how long the header is, the header, the elements."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        elements = bytes(tensor.flatten().view(torch.uint8).tolist())
        ends = [len(data), len(data) + len(elements)]
        header[name] = {"dtype": SPELLED[tensor.dtype], "shape": [*tensor.shape], "data_offsets": ends}
        data += elements
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def put(folder: str, files: list[dict[str, torch.Tensor]]) -> None:
    """Write tensors as safetensors, with the index that says in which file each is."""
    where: dict[str, str] = {}
    for at, tensors in enumerate(files):
        Path(folder, f"{at}.safetensors").write_bytes(in_safetensors(tensors))
        where |= dict.fromkeys(tensors, f"{at}.safetensors")
    index = {"metadata": {}, "weight_map": where}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))


@law(
    "roundtrip.quantized",
    source="torch.distributed.checkpoint docs, QuantizedHuggingFaceStorageReader: from quantized blocks to full "
    "dequantized tensors",
    control="mesh=2 w=5x6:-:float32:small s=3x3:-:float32:small to=S(0) block=2",
    sweep=texts(*QUANTIZED),
    sweeps=len(QUANTIZED),
    needs=NEEDS_FILES,
    smallest=1,
)
def quantized(
    w: torch.Tensor,
    s: torch.Tensor,
    to: Placements,
    mesh: DeviceMesh,
    rank: Rank,
    folder: Folder,
    form: Form = "blocks",
    codes: Codes = "float8_e4m3fn",
    files: Literal["one", "two"] = "one",
    block: int = 128,
    dtype: torch.dtype = torch.float32,
    threads: int = 1,
):
    """Read from a file in which it is quantized, a tensor is on every rank its part of the dequantized one, wherever
    that is cut; a tensor beside it that is not quantized is read as it is."""
    name, of_scales = NAMES[form]
    size = [*w.shape] if form == "blocks" else [*w.shape[:2], w.shape[2] * w.shape[3] * 2]
    if rank == 0:
        first = {name: w.to(getattr(torch, codes)) if form == "blocks" else w, "a.bias": s.flatten()}
        second = {of_scales: s if form == "blocks" else s + BIAS}
        put(folder, [first, second] if files == "two" else [first | second])
    dist.barrier()
    destination = full(size, POISON, dtype=dtype, device_mesh=mesh, placements=to)
    state = {name: destination, "a.bias": torch.full([s.numel()], POISON).to(s)}
    reader = QuantizedHuggingFaceStorageReader(folder, thread_count=threads, target_dtype=dtype, block_size=block)
    loaded = load(state, reader)
    if form == "mxfp4-head":
        loaded[name] = loaded[name].full_tensor()[..., : w.shape[2]]
    return {"dequantized": loaded[name], "beside": loaded["a.bias"]}


def value_of_fp4(code: int) -> float:
    """The number that four bits say: a sign, two bits of an exponent, one of a mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if code >> 3 else size


@quantized.due
def _(w: torch.Tensor, s: torch.Tensor, mesh, to, form="blocks", block=128, dtype=torch.float32):
    need("safetensors")
    if form == "blocks":
        scales = s.repeat_interleave(block, 0).repeat_interleave(block, 1)[: w.shape[0], : w.shape[1]]
        whole = w * scales
    else:
        numbers = torch.tensor([value_of_fp4(code) for code in range(16)])
        pairs = torch.stack([w % 16, w // 16], -1).long()
        scaled = numbers[pairs] * 2.0 ** (s.to(torch.float32) + BIAS - 127)[..., None, None]
        whole = scaled.flatten(2)
    whole = whole.to(dtype)
    if form == "mxfp4-head":
        return {"dequantized": whole[..., : w.shape[2]], "beside": s.flatten()}
    return {"dequantized": Global(whole, Layout(tuple(whole.shape), mesh, to)), "beside": s.flatten()}
