"""Cache of values that wait for the device, so that they are computed once and not in every layer."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Value = TypeVar("Value")


class OncePerTensor(Generic[Value]):
    """Caches the value of a function for each tensor.

    A value lives as long as the tensor *object* and is computed again after an in-place change. (Tensors made in
    inference mode count no changes; they must not be changed.)

    Example: `OncePerTensor(Tensor.tolist)(torch.tensor([0, 2, 5]))` is `[0, 2, 5]`.
    """

    def __init__(self, compute: Callable[[Tensor], Value]) -> None:
        self.compute = compute
        self._known: MutableMapping[Tensor, tuple[int, Value]] = WeakTensorKeyDictionary()

    def __call__(self, tensor: Tensor) -> Value:
        changes = 0 if tensor.is_inference() else tensor._version
        found = self._known.get(tensor)
        if found is None or found[0] != changes:
            found = self._known[tensor] = (changes, self.compute(tensor))
        return found[1]

    def __len__(self) -> int:
        return len(self._known)
