"""aten operators on the devices: the same overload of the CPU, over the same bytes.

Only where torch_npu has a kernel of its own is it replaced, so an operator that torch_npu lacks does not seem to be
there. What torch_npu would hand to its fallback (copy to the host, compute, copy back) runs too, and is counted as
"fallback::name" so that a test can refuse it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.host_cann.counting import count
from tests.host_cann.memory import copy_to, view

KEY = "PrivateUse1"
_HOST = torch.device("cpu")
_NPU = "npu"

OWN = frozenset(
    (
        *("empty.memory_format", "empty_like", "empty_strided", "new_empty_strided"),
        *("as_strided", "as_strided_", "_reshape_alias", "alias", "detach", "unfold", "view"),
        *("view_as_complex", "view_as_real", "set_", "is_set_to", "resize_", "resize_as_"),
        *("_copy_from_and_resize", "is_pinned", "_pin_memory", "record_stream"),
        *("_fused_adamw_", "scaled_dot_product_attention", "_fused_sdp_choice"),
    )
)
"""torch_npu's own kernels stay: those that only manage memory, and those that call the fused operators."""

HOST_INDICES = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))
"""These take indices on the host, too; the device is given copies of them."""

_libraries: list[torch.library.Library] = []


def install() -> None:
    aten, npu = torch.library.Library("aten", "IMPL"), torch.library.Library("npu", "IMPL")
    _libraries.extend((aten, npu))  # they take their kernels with them when they go
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every kernel here replaces one
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::"):
                kernel = _kernel(name)
                if kernel is not None:
                    aten.impl(name.removeprefix("aten::"), kernel, KEY)
        npu.impl("npu_format_cast", _format_cast, KEY)


def _kernel(qualified: str) -> Callable[..., Any] | None:
    """The kernel to install for an operator, or None to leave it alone."""
    name = qualified.removeprefix("aten::")
    base, _, overload = name.partition(".")
    if base in OWN or name in OWN:
        return None
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    native, on_host = has(qualified, KEY), has(qualified, "CPU")
    composite = any(has(qualified, f"Composite{kind}") for kind in ("ImplicitAutograd", "ExplicitAutograd"))
    composite = composite or has(qualified, "CompositeExplicitAutogradNonFunctional")
    if native and name in SPECIAL:
        return SPECIAL[name]
    if not (native and (on_host or composite)) and not (not native and on_host and not composite):
        return None
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
    if any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns):
        return None  # a view: it only describes memory
    return _on_host(operator, f"aten::{base}" if native else f"fallback::{base}")


# ---- one operator --------------------------------------------------------------------------------------------------


def _on_host(operator: OpOverload, label: str) -> Callable[..., Any]:
    """Runs `operator` over the bytes of its tensors. What can be known beforehand is found out here, once."""
    schema = operator._schema
    arguments = schema.arguments
    base = operator._schema.name.removeprefix("aten::")
    positions = {argument.name: index for index, argument in enumerate(arguments)}
    outputs = frozenset(a.name for a in arguments if a.is_out and str(a.type) == "Tensor")
    written = [_written_argument(r, arguments) for r in schema.returns]
    single = len(written) == 1
    draws = torch.Tag.nondeterministic_seeded in operator.tags
    takes_generator = "generator" in positions
    any_host_index = base in HOST_INDICES

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _Call(label, any_host_index)
        host_args = [call.to_host(value) for value in args]
        host_kwargs = {
            name: call.output(value) if name in outputs else call.to_host(value) for name, value in kwargs.items()
        }
        count(label)
        if draws:
            generator = kwargs.get("generator")
            if generator is None and takes_generator and positions["generator"] < len(args):
                generator = args[positions["generator"]]
            result = _draw(operator, host_args, host_kwargs, generator, call.device, takes_generator)
        else:
            result = operator(*host_args, **host_kwargs)
        if call.outputs:
            call.give_outputs()
        if single:
            name = written[0]
            return call.to_device(result) if name is None else _argument(name, positions, args, kwargs)
        if not written:
            return None
        return tuple(
            call.to_device(value) if name is None else _argument(name, positions, args, kwargs)
            for value, name in zip(result, written, strict=True)
        )

    return kernel


def _written_argument(value: Any, arguments: Any) -> str | None:
    """The argument that a return value is, for operators that write into their arguments."""
    if value.alias_info is None or not value.alias_info.is_write:
        return None
    names = [
        a.name for a in arguments if a.alias_info is not None and a.alias_info.before_set == value.alias_info.before_set
    ]
    return names[0]


def _argument(name: str, positions: dict[str, int], args: Any, kwargs: Any) -> Any:
    return kwargs[name] if name in kwargs else args[positions[name]]


class _Call:
    """The tensors of one call: device memory seen from the host, and results on their way back."""

    __slots__ = ("any_host_index", "index", "label", "outputs")

    def __init__(self, label: str, any_host_index: bool) -> None:
        self.label = label
        self.any_host_index = any_host_index
        self.index = -1
        self.outputs: list[tuple[Tensor, Tensor]] = []

    @property
    def device(self) -> torch.device:
        return torch.device(_NPU, self.index if self.index >= 0 else torch.get_device_module(_NPU).current_device())

    def to_host(self, value: Any) -> Any:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            return self.tensor(value)
        if kind is list or kind is tuple:
            return [self.to_host(item) for item in value] if value and not isinstance(value[0], (int, float)) else value
        if kind is torch.device:
            if value.type == _NPU:
                self.index = torch.get_device_module(_NPU).current_device() if value.index is None else value.index
                return _HOST
        elif kind is torch.Generator:
            return None  # `_draw` has it
        return value

    def tensor(self, value: Tensor) -> Tensor:
        index = value.get_device()
        if index < 0:
            if value.dim() and not self.any_host_index:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {self.label} was given one on the "
                    f"{value.device.type}, of shape {list(value.shape)}"
                )
            return value
        if self.index < 0:
            self.index = index
        elif self.index != index:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self.label} was given some on npu:{self.index} "
                f"and npu:{index}"
            )
        return view(value)

    def output(self, value: Tensor) -> Tensor:
        """The host's operator fills a tensor of its own, which it may resize."""
        self.tensor(value)
        made = torch.empty(0, dtype=value.dtype)
        self.outputs.append((value, made))
        return made

    def give_outputs(self) -> None:
        for target, made in self.outputs:
            if target.shape != made.shape:
                target.resize_(made.shape)
            if made.numel():
                view(target).copy_(made)

    def to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_to(value, self.device)
        if isinstance(value, (list, tuple)):
            return [self.to_device(item) for item in value]
        return value


# ---- random numbers ------------------------------------------------------------------------------------------------


def _draw(
    operator: OpOverload, args: list[Any], kwargs: dict[str, Any], generator: Any, device: torch.device, accepts: bool
) -> Any:
    """Draws on the host from a seed made of the device generator's seed and offset, and moves the offset on.

    The state stays with torch_npu's generator, so that seeding, saving and restoring it work as ever.
    """
    if generator is not None and generator.device.type != _NPU:
        raise RuntimeError(f"Expected a '{_NPU}' device type for generator but found '{generator.device.type}'")
    source = torch.get_device_module(_NPU).default_generators[device.index] if generator is None else generator
    offset = source.get_offset()
    source.set_offset(offset + 4)  # a Philox block; CANN moves in multiples of four
    seed = (source.initial_seed() + 0x9E3779B97F4A7C15 * (offset // 4)) % 2**63
    if accepts:
        kwargs["generator"] = torch.Generator().manual_seed(seed)
        names = [argument.name for argument in operator._schema.arguments]
        return operator(*args[: names.index("generator")], **kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return operator(*args, **kwargs)


# ---- operators that the rule above does not fit --------------------------------------------------------------------


def _seen(value: Tensor) -> Tensor:
    return view(value) if value.get_device() >= 0 else value


def _copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    count("aten::copy_")
    _seen(self).copy_(_seen(src))
    return self


def _copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy_(dst, self)


def _to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    count("aten::_to_copy")
    made = torch.ops.aten._to_copy.default(_seen(self), dtype=dtype, memory_format=memory_format)
    target = self.device if device is None else torch.device(device)
    return made if target.type == "cpu" else copy_to(made, target)


def _local_scalar_dense(self: Tensor) -> Any:
    count("aten::_local_scalar_dense")
    return view(self).item()


def _matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    """torch_npu has a backward of matmul of its own, which the CPU has not."""
    count("aten::matmul_backward")
    left, right, g = view(self), view(other), view(grad)
    if left.dim() == 1:
        left, g = left.unsqueeze(0), g.unsqueeze(-2 if right.dim() > 1 else 0)
    if right.dim() == 1:
        right, g = right.unsqueeze(-1), g.unsqueeze(-1)
    made: list[Tensor | None] = [None, None]
    if mask[0]:
        made[0] = (g @ right.mT).sum_to_size(left.shape).reshape(self.shape)
    if mask[1]:
        made[1] = (left.mT @ g).sum_to_size(right.shape).reshape(other.shape)
    return tuple(None if value is None else copy_to(value, self.device) for value in made)


def _repeat_interleave_backward(grad: Tensor, self: Tensor, repeats: int, dim: int | None = None) -> Tensor:
    count("aten::repeat_interleave_backward_int")
    seen = view(grad)
    if dim is None:
        summed = seen.reshape(-1, repeats).sum(1).view(self.shape)
    else:
        summed = seen.unflatten(dim, (-1, repeats)).sum(dim % self.dim() + 1)
    return copy_to(summed, self.device)


def _format_cast(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Private formats are not modelled: every tensor stays as it is."""
    count("npu::npu_format_cast")
    return copy_to(view(self).clone(), self.device)


SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": _copy_,
    "_copy_from": _copy_from,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _local_scalar_dense,
    "matmul_backward": _matmul_backward,
    "repeat_interleave_backward_int": _repeat_interleave_backward,
}
