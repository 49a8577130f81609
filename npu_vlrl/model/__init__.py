import npu_vlrl.hardware  # noqa: F401  (a torch_npu that cannot load is hidden before transformers looks for it)
