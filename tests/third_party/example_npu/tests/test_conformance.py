"""Both implementations conform. Here there is no NPU: its arithmetic is tried on the CPU."""

from kvcache_plugin_example import cpu_nvfp4, npu

from kvcache_plugin.testing import ConformanceSuite


class TestNpu(ConformanceSuite):
    implementation = npu
    device = "privateuseone"


class TestCpuNvfp4(ConformanceSuite):
    implementation = cpu_nvfp4
