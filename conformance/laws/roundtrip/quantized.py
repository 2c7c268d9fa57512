"""The law on torch's reader of quantized safetensors, which dequantizes.

``form=blocks``  a matrix ``w`` of codes, with a scale in ``s`` for each block of ``block`` rows and columns
``form=mxfp4``   an OCP microscaling format: ``w`` has two codes of four bits a byte, the lower bits first, in groups
                 along its last dim, and ``s`` the exponent of each group
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

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Folder, Placements, Rank
from shardlaw.conformance.laws.checkpoint.calls import load
from shardlaw.conformance.laws.roundtrip.cases import NEEDS_FILES
from shardlaw.conformance.laws.roundtrip.options import require_package
from shardlaw.reference.layout import Layout

# "mxfp4-head" compares as many elements of the last dim as there are groups, which is all that torch reads
Form = Literal["blocks", "mxfp4", "mxfp4-head"]
Codes = Literal["float8_e4m3fn", "float8_e5m2", "int8"]
POISON = 113.0
BIAS = 120  # from the exponents of a case to those in the file; those of E8M0 have a bias of 127
DTYPE_NAMES = {
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


def encode_safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """Tensors in the format safetensors: the length of the header, the header, the elements."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        elements = bytes(tensor.flatten().view(torch.uint8).tolist())
        ends = [len(data), len(data) + len(elements)]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": ends}
        data += elements
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_safetensors(folder: str, files: list[dict[str, torch.Tensor]]) -> None:
    """Write files of safetensors, and their index."""
    weight_map: dict[str, str] = {}
    for at, tensors in enumerate(files):
        Path(folder, f"{at}.safetensors").write_bytes(encode_safetensors(tensors))
        weight_map |= dict.fromkeys(tensors, f"{at}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))


@law(
    "roundtrip.quantized",
    source="torch.distributed.checkpoint docs, QuantizedHuggingFaceStorageReader: from quantized blocks to full "
    "dequantized tensors",
    control="mesh=2 w=5x6:-:float32:small s=3x3:-:float32:small to=S(0) block=2",
    cases=QUANTIZED,
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
    """A load of a quantized tensor gives every rank its part of the dequantized one, with any layout; other tensors in
    the file load unchanged."""
    name, scales_name = NAMES[form]
    size = [*w.shape] if form == "blocks" else [*w.shape[:2], w.shape[2] * w.shape[3] * 2]
    if rank == 0:
        first = {name: w.to(getattr(torch, codes)) if form == "blocks" else w, "a.bias": s.flatten()}
        second = {scales_name: s if form == "blocks" else s + BIAS}
        write_safetensors(folder, [first, second] if files == "two" else [first | second])
    dist.barrier()
    destination = full(size, POISON, dtype=dtype, device_mesh=mesh, placements=to)
    state = {name: destination, "a.bias": torch.full([s.numel()], POISON).to(s)}
    reader = QuantizedHuggingFaceStorageReader(folder, thread_count=threads, target_dtype=dtype, block_size=block)
    loaded = load(state, reader)
    if form == "mxfp4-head":
        loaded[name] = loaded[name].full_tensor()[..., : w.shape[2]]
    return {"dequantized": loaded[name], "beside": loaded["a.bias"]}


def decode_fp4(code: int) -> float:
    """The value of four bits: a sign, two bits of an exponent, one of a mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if code >> 3 else magnitude


@quantized.due
def _(w: torch.Tensor, s: torch.Tensor, mesh, to, form="blocks", block=128, dtype=torch.float32):
    require_package("safetensors")
    if form == "blocks":
        scales = s.repeat_interleave(block, 0).repeat_interleave(block, 1)[: w.shape[0], : w.shape[1]]
        dequantized = w * scales
    else:
        values = torch.tensor([decode_fp4(code) for code in range(16)])
        pairs = torch.stack([w % 16, w // 16], -1).long()
        scaled = values[pairs] * 2.0 ** (s.to(torch.float32) + BIAS - 127)[..., None, None]
        dequantized = scaled.flatten(2)
    dequantized = dequantized.to(dtype)
    if form == "mxfp4-head":
        return {"dequantized": dequantized[..., : w.shape[2]], "beside": s.flatten()}
    return {"dequantized": Global(dequantized, Layout(tuple(dequantized.shape), mesh, to)), "beside": s.flatten()}
