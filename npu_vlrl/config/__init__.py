"""The configuration: `schema.py` is what there is, `file.py` reads and writes it."""

from npu_vlrl.config.file import dump_config, load_config, sections
from npu_vlrl.config.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    CriticConfig,
    EnvironmentConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    SourceConfig,
    WorkflowConfig,
)

__all__ = [
    "AlgorithmConfig",
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
