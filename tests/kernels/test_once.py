"""What is computed once for a tensor follows the tensor object, not its address."""

import torch

from npu_vlrl.kernels.attention import _on_host
from npu_vlrl.kernels.tensor_cache import OncePerTensor


def test_computed_again_only_after_a_change() -> None:
    once = OncePerTensor(torch.Tensor.tolist)
    boundaries = torch.tensor([0, 2, 5])
    first = once(boundaries)
    assert first == [0, 2, 5] and once(boundaries) is first
    boundaries[1] = 3
    assert once(boundaries) == [0, 3, 5]


def test_nothing_is_kept_of_tensors_that_died() -> None:
    once = OncePerTensor(torch.Tensor.tolist)
    for n in range(50):  # each dies before the next is made, so addresses come back
        assert once(torch.tensor([0, n])) == [0, n]
    assert len(once) <= 1


def test_tensors_of_inference_mode_count_no_changes() -> None:
    with torch.inference_mode():
        assert OncePerTensor(torch.Tensor.tolist)(torch.tensor([0, 7])) == [0, 7]


def test_lengths_that_are_on_the_host_stay_what_they_are() -> None:
    boundaries = [0, 4]
    assert _on_host(boundaries) is boundaries
    assert _on_host(torch.tensor(boundaries)) == boundaries
