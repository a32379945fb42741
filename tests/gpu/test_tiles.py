"""The kernels' own tests, which the suite runs in Triton's interpreter, compiled for the device."""

from tests.ops.test_fresh_memory import *  # noqa: F403
from tests.ops.test_related import *  # noqa: F403
from tests.ops.test_triton_tiles import *  # noqa: F403
from tests.ops.test_triton_topk import *  # noqa: F403
from tests.ops.test_triton_whole import *  # noqa: F403
