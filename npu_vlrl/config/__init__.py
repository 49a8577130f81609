"""The configuration: `schema.py` and `training.py` define it, `file.py` reads and writes it."""

from npu_vlrl.algorithms import AlgorithmConfig
from npu_vlrl.common.fields import ConfigError
from npu_vlrl.config.file import dump_config, load_config, sections
from npu_vlrl.config.schema import (
    ColumnsConfig,
    Config,
    EnvironmentConfig,
    LoraConfig,
    ModelConfig,
    SourceConfig,
    WorkflowConfig,
)
from npu_vlrl.config.training import CriticConfig, OptimConfig

__all__ = [
    "AlgorithmConfig",
    "ColumnsConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "EnvironmentConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "SourceConfig",
    "WorkflowConfig",
    "dump_config",
    "load_config",
    "sections",
]
