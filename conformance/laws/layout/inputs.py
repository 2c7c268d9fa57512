"""Laws of inputs of ``distribute_tensor`` and ``from_local`` that are not plain dense tensors."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Meaningless, Refused
from shardlaw.conformance.law.fields import Device, WordField
from shardlaw.conformance.law.law import Limits

DOC = "torch.distributed.tensor docs"


class Subclass(torch.Tensor):
    """A tensor class of a user, without attributes."""


# tensors of four elements or 4x4, and inputs that are no tensors
KINDS = {
    "conj": lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    "neg": lambda: torch.complex(torch.ones(4), torch.arange(4.0)).conj().imag,
    "subclass": lambda: torch.arange(4.0).as_subclass(Subclass),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 0, torch.quint8),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "list": lambda: [1.0, 2.0],
    "number": lambda: 1.0,
    "none": lambda: None,
}
WAYS = {
    "scatter": lambda x, mesh: distribute_tensor(x, mesh, [Shard(0)]),
    "broadcast": lambda x, mesh: distribute_tensor(x, mesh, [Replicate()]),
    "local": lambda x, mesh: DTensor.from_local(x, mesh, [Shard(0)], run_check=False),
}
REFUSED = ("nested", "list", "number", "none")


def to_plain(x):
    """The same elements in a plain dense tensor."""
    if x.is_quantized:
        return x.dequantize()
    x = x.to_dense() if x.layout != torch.strided else x.as_subclass(torch.Tensor)
    return x.resolve_conj().resolve_neg().clone()


def sweep_inputs(limits: Limits) -> list[Case]:
    return [fields(mesh=2, kind=kind, way=way) for kind in KINDS for way in WAYS]


@law(
    "layout.inputs",
    source=f"{DOC}, distribute_tensor and DTensor.from_local: a torch.Tensor",
    control="mesh=2 kind=neg way=scatter",
    features=lambda case: {f"input:{case.get('kind')}"},
    sweep=sweep_inputs,
    sweeps=33,
    weight=0.2,
)
def inputs(
    mesh: DeviceMesh, kind: Annotated[str, WordField(KINDS)], way: Annotated[str, WordField(WAYS)], device: Device
):
    """Conjugated, negated, quantized and sparse tensors and subclasses are distributed with the right elements, or
    refused by all ranks; nested tensors and other objects are refused."""
    x = KINDS[kind]()
    try:
        x = x.to(device) if isinstance(x, torch.Tensor) else x
    except NotImplementedError as error:  # the device does not support this kind
        raise Meaningless(str(error)) from None
    try:
        d = WAYS[way](x, mesh)
    except Exception as error:
        return {"full": error}
    try:
        full: Any = d.full_tensor()
    except NotImplementedError as error:  # the backend does not support the dtype
        return {"full": error}
    return {"full": to_plain(full)}


@inputs.due
def _(kind, way, mesh):
    if kind in REFUSED:
        return {"full": Refused()}
    full = to_plain(KINDS[kind]())
    return {"full": Either((torch.cat([full] * mesh.size) if way == "local" else full, Refused()))}
