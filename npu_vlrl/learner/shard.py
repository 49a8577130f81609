"""A policy sharded over the learners: each has some rows of every weight, of its gradient and of AdamW's moments.

It uses torch's FSDP2 (Zhao et al. 2023, arXiv 2304.11277). Each decoder layer and each block of a trained tower is
all-gathered when it runs and resharded afterwards; the other weights (embedding, final norms, head) stay gathered for a
full micro-batch. Gradients are reduce-scattered as soon as a layer is done, in each micro-batch: full gradients until
the last micro-batch would take 4 bytes a parameter on every rank.

A trained weight of 16 bits is sharded in float32: its rows are the masters (`optimizer.py`), and gathered weights are
rounded. A frozen tower is not sharded, so that a rank without images need not run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from npu_vlrl.learner.optimizer import master, set_shard
from npu_vlrl.learner.ranks import Ranks
from npu_vlrl.model.policy import Policy


class ShardedPolicy(Policy):
    """A sharded policy. All ranks run it at the same time: `gathered` and `write_into` are collectives.

    Its parameters are those of FSDP; `optimizer.master` of a parameter is the shard of this rank.
    """

    def __init__(self, policy: Policy, ranks: Ranks, offload: bool) -> None:
        """Shards the model of `policy` in place; every rank has it in full before, and must not use it afterwards.

        With `offload`, the shards of weights, gradients and moments are in the memory of the host.
        """
        assert ranks.group is not None, "a policy cannot be sharded over one process"
        super().__init__(policy.model, policy.special, policy.n_tokens, policy.merge_size)
        self._ranks = ranks
        self._dtype = policy.dtype
        self.tower_is_divided = not self.vision_is_frozen
        narrow = self._dtype.itemsize < 4
        self._root = _shard(
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
            set_shard(parameter, rows.detach().requires_grad_())

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def gathered(self, work: Callable[[], Tensor]) -> Tensor:
        found: Tensor = self._root(work)  # type: ignore[operator]  # it is a module, too
        return found

    def divide(self) -> None:
        self._root.reshard()

    def no_picture(self) -> Tensor:
        """Features of no placeholder, [0, hidden], for use within `gathered`: the tower runs on a blank image."""
        assert self.vision is not None
        grid = self.vision.shape.smallest
        patches_PD = torch.zeros(math.prod(grid), self.vision.patch_values, device=self.device)
        return self.encode(patches_PD, [grid])[0][:0]

    @torch.no_grad()
    def write_into(self, full: Policy) -> None:
        """Copies the trained weights to a full policy, in its dtype; one tensor at a time is gathered."""
        for (name, to), parameter in zip(full.trainable().items(), self.trainable().values(), strict=True):
            rows = master(parameter).to(to.device, to.dtype)
            assert to.shape == parameter.shape, name
            to.copy_(self._ranks.gather_rows(rows, len(to)))

    def _parts(self) -> Iterator[nn.Module]:
        """Modules that are gathered separately, in the order of a pass."""
        if self.tower_is_divided and self.vision is not None:
            yield from self.vision.blocks
        yield from self.text.layers


class _Passage(nn.Module):
    """Root module of FSDP, whose forward runs any work: FSDP gathers a module's weights when its forward begins, and a
    policy does more than one forward of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Tensor]) -> Tensor:
        return work()


def _shard(parts: Iterator[nn.Module], root: nn.Module, **options: object) -> FSDPModule:
    """Shards each part and then the rest of the root, module by module: only one at a time is full in float32."""
    for module in (*parts, root):
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                parameter.data = parameter.data.float()
        sharded: FSDPModule = fully_shard(module, reshard_after_forward=module is not root, **options)  # type: ignore
        sharded.set_gradient_divide_factor(1.0)  # weights of tokens hold the counts of all ranks
        sharded.set_force_sum_reduction_for_comms(True)  # gloo and others know no scaled sum
    return sharded
