"""NPUs under Ray: each process has one of those that are visible on the host, by its number there."""

from __future__ import annotations

import json
from pathlib import Path

from tests.host_cann import children

TEXT = """
import json, os
from npu_vlrl.cluster.placement import bundles, connected, reserved
from npu_vlrl.config import load_config
from npu_vlrl.hardware import select

CHILD = '''
import torch, torch_npu
from npu_vlrl.hardware import select
platform = select()
platform.set_device(0)
print("OWN", platform.device_count(), platform.physical_id(0), torch.ones(3, device=platform.device()).sum().item())
'''

config, platform = load_config(os.environ["CONFIG"], ["ray.processes=2"]), select()
assert platform.device_count() == 2, platform.device_count()
with connected(config, platform) as ray, reserved(ray, bundles(config, platform), platform) as places:
    print(json.dumps({"devices": [place.devices for place in places]}))

    def look(text):
        import subprocess, sys
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        return [line for line in done.stdout.splitlines() if line.startswith("OWN")] or [done.stderr]

    for place in places:
        print(json.dumps(ray.get(place.actor.__ray_call__.remote(lambda actor, text: look(text), CHILD))))
"""


def test_two_processes_each_see_one_of_the_visible_npus(tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text("model: {path: 'tiny:qwen2_5_vl'}\ndata: {train: {generator: arrow}}\n")
    (ended,) = children.run(TEXT, CONFIG=str(config), ASCEND_RT_VISIBLE_DEVICES="4,5", HOST_CANN_DEVICES="8")
    assert ended.code == 0, ended.output
    assert '{"devices": ["4", "5"]}' in ended.output, ended.output
    own = [json.loads(line)[0] for line in ended.output.splitlines() if line.startswith("[")]
    assert own == ["OWN 1 4 3.0", "OWN 1 5 3.0"], ended.output
