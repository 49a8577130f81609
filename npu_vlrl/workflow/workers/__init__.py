"""Worker processes that can be killed, for code of unknown duration: rules on hostile answers, users' functions.

A service is a module with `open_service(options) -> (hello, handle)`. It runs in its own processes (`serve.py`), which
a `WorkerPool` starts, feeds, kills at the deadline and replaces.
"""

from npu_vlrl.common.user_file import is_spec, load_function
from npu_vlrl.workflow.workers.pool import WorkerError, WorkerPool, check_limits

__all__ = ["WorkerError", "WorkerPool", "check_limits", "is_spec", "load_function"]
