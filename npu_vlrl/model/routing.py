"""Router replay: a mixture of experts learns through the experts that sampled.

A router picks experts by comparing scores, so the last bits of a sum decide which experts a token meets. Engine and
learner add in different orders, and a token that meets other experts has another probability. The engine therefore
records the experts of each token, and the learner replays them: the router still weighs the experts, and learns, but
does not choose (Rollout Routing Replay, Ma et al. 2025, arXiv 2510.11370).

Routes are int16 [T, L, k]: the k experts of a token in each of the L layers that have a router; -1 where the engine did
not say, and the learner's own router chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from npu_vlrl.model.families.base import Family


class Routing:
    """The experts of one forward pass over T tokens. Without routes it records, with routes it replays them.

    Example: `policy.hidden_packed(..., routing=Routing(routes_TLk))`
    """

    def __init__(self, routes_TLk: Tensor | None = None) -> None:
        self.routes_TLk = routes_TLk
        self._chosen: dict[int, Tensor] = {}
        self._changed: dict[int, Tensor] = {}

    def choose(self, layer: int, own_Tk: Tensor) -> Tensor:
        """The experts [T, k] of the tokens in one of the L layers, by the experts that its router would choose.

        Repeated by gradient checkpointing, it chooses the same.
        """
        if self.routes_TLk is None:
            self._chosen[layer] = own_Tk
            return own_Tk
        routes_Tk = self.routes_TLk[:, layer].to(own_Tk.dtype)
        known_T1 = routes_Tk[:, :1] >= 0
        differs_T = (routes_Tk.sort(1).values != own_Tk.sort(1).values).any(1)
        self._changed[layer] = differs_T & known_T1[:, 0]
        return torch.where(known_T1, routes_Tk, own_Tk)

    def recorded(self) -> Tensor:
        """int16 [T, L, k]: the experts that routers chose in the pass."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], 1).to(torch.int16)

    def changed(self) -> tuple[Tensor, Tensor]:
        """Share of the L layers of a token in which the last pass replaced its experts, summed over the tokens whose
        routes are known; and the number of these tokens. Scalars.
        """
        assert self.routes_TLk is not None
        changed_L = torch.stack(list(self._changed.values())).sum(1)
        return changed_L.float().mean(), (self.routes_TLk[:, 0, 0] >= 0).sum()


def attach_routers(model: Any, family: Family) -> None:
    """Lets the routers of a built model follow the `routing` that its language model is called with."""
    for number, (layer, path) in enumerate(_layers_with_router(model, family)):
        router: Any = layer.get_submodule(path)
        router.routing = None
        router.register_forward_hook(partial(_follow, family, number))
        # A layer is given its arguments again when gradient checkpointing repeats it; its router has none of them.
        layer.register_forward_pre_hook(partial(_hand_over, path), with_kwargs=True)


def expert_layers(model: Any, family: Family) -> list[nn.Module]:
    """The mixtures of a model, routers included, in the order of its layers."""
    return [layer.get_submodule(path.rpartition(".")[0]) for layer, path in _layers_with_router(model, family)]


def _layers_with_router(model: Any, family: Family) -> Iterator[tuple[nn.Module, str]]:
    if family.mixture is not None:
        path = family.mixture.router
        for layer in model.get_submodule(family.text).layers:
            if path in dict(layer.named_modules()):
                yield layer, path


def _hand_over(path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    router: Any = layer.get_submodule(path)
    router.routing = kwargs.get("routing")


def _follow(family: Family, number: int, router: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> Any:
    """The output of a router whose experts are those of its `routing`, if it has one."""
    routing: Routing | None = router.routing
    if routing is None:
        return output
    scores_TE, weights_Tk, own_Tk = output
    chosen_Tk = routing.choose(number, own_Tk)
    if chosen_Tk is own_Tk:
        return output
    return scores_TE, family.expert_weights(scores_TE, chosen_Tk).to(weights_Tk.dtype), chosen_Tk
