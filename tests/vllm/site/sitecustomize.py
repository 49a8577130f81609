"""Lets torchvision be imported where an index serves its build for GPUs beside a torch without.

That build's operators cannot be loaded, and vLLM calls none of them; but the package describes two of them while it is
imported, also in processes that vLLM starts. So they are declared just before that.
"""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.operators = torch.library.Library("torchvision", "FRAGMENT")
            declare.append(self)  # what is declared goes with its object
            for operator in ("nms", "qnms"):
                self.operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


declare = []
sys.meta_path.insert(0, _Declare())
