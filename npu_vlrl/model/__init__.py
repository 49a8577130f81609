"""A Hugging Face folder as a policy. Importing it needs a release of transformers that the project was tested with.

Raises HardwareError for another one, before anything of it is imported.
"""

from npu_vlrl.hardware import HardwareError, software  # also hides a plug-in of torch that cannot load

if problem := software.unsupported():
    raise HardwareError(problem)
