"""A policy divided over the learners: each holds some rows of every weight, of its gradient and of what AdamW keeps.

By FSDP2 of torch (Zhao et al. 2023, arXiv 2304.11277). Each decoder layer and each block of a trained tower is gathered
when it runs and given up afterwards; what is in none of them (embedding, norms at the end, head) is gathered for the
whole of a micro-batch. Gradients are added up over ranks and divided as soon as a layer is done, in each micro-batch:
to keep whole ones until the last would take 4 bytes a parameter on every rank.

A trained weight of 16 bits is divided in float32: its rows are the masters (`optimizer.py`), and what is gathered is
rounded. A frozen tower stays whole, so that a rank without pictures need not run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from npu_vlrl.learner.optimizer import give_rows, master
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.model.policy import Policy


class ShardedPolicy(Policy):
    """A policy that all ranks go through at the same time: `gathered` and `write_into` are collectives.

    Its parameters are those of FSDP; `optimizer.master` of one is what this rank holds of it.
    """

    def __init__(self, policy: Policy, ranks: Ranks, offload: bool) -> None:
        """Divides the model of `policy`, which every rank has as a whole, and which is of no more use by itself.

        With `offload`, what a rank holds of the weights, gradients and moments is in the memory of the host.
        """
        assert ranks.group is not None, "one process alone has nothing to divide a policy over"
        super().__init__(policy.model, policy.special, policy.n_tokens, policy.merge_size)
        self._ranks = ranks
        self._dtype = policy.dtype
        self.tower_is_divided = not self.vision_is_frozen
        narrow = self._dtype.itemsize < 4
        self._root = _divide(
            self._parts(),
            _Passage(self.model),
            mesh=DeviceMesh.from_group(ranks.group, self.device.type),
            ignored_params=set() if self.tower_is_divided or self.vision is None else set(self.vision.parameters()),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=self._dtype if narrow else None,
                reduce_dtype=torch.float32 if narrow else None,
                cast_forward_inputs=False,  # the tower rotates in float32
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if offload else OffloadPolicy(),
        )
        for parameter in self.trainable().values():
            rows = parameter.to_local()  # type: ignore[attr-defined]
            give_rows(parameter, rows.detach().requires_grad_())

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def gathered(self, work: Callable[[], Tensor]) -> Tensor:
        found: Tensor = self._root(work)  # type: ignore[operator]  # it is a module, too
        return found

    def divide(self) -> None:
        self._root.reshard()

    def no_picture(self) -> Tensor:
        """Features of no placeholder, within `gathered`: the tower runs, and what comes of it has no rows."""
        assert self.vision is not None
        grid = self.vision.shape.smallest
        patches_PD = torch.zeros(math.prod(grid), self.vision.patch_values, device=self.device)
        return self.encode(patches_PD, [grid])[0][:0]

    @torch.no_grad()
    def write_into(self, whole: Policy) -> None:
        """Gives the trained weights to a policy that is not divided, in its dtype; one tensor at a time is gathered."""
        for (name, to), parameter in zip(whole.trainable().items(), self.trainable().values(), strict=True):
            rows = master(parameter).to(to.device, to.dtype)
            assert to.shape == parameter.shape, name
            to.copy_(self._ranks.gather_rows(rows, len(to)))

    def _parts(self) -> Iterator[nn.Module]:
        """What is gathered by itself, in the order of a pass."""
        if self.tower_is_divided and self.vision is not None:
            yield from self.vision.blocks
        yield from self.text.layers


class _Passage(nn.Module):
    """FSDP gathers a module's weights when its forward begins; a policy's way through a model is more than that."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        return work()


def _divide(parts: Iterator[nn.Module], root: nn.Module, **options: object) -> FSDPModule:
    """Divides each part and then what is left in the root, module by module: only one is widened at a time."""
    for module in (*parts, root):
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                parameter.data = parameter.data.float()
        divided: FSDPModule = fully_shard(module, reshard_after_forward=module is not root, **options)  # type: ignore
        divided.set_gradient_divide_factor(1.0)  # weights of tokens hold the counts of all ranks
        divided.set_force_sum_reduction_for_comms(True)  # gloo and others know no scaled sum
    return divided
