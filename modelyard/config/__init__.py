"""The whole configuration: one schema, three styles of names, layers, and errors that say where and what."""

from modelyard.config.backends import engine_options, engine_spec
from modelyard.config.describe import CacheRow, Description, ModelRow, RouteRow, describe
from modelyard.config.load import Loaded, load
from modelyard.config.problems import ConfigError, ConfigProblem
from modelyard.config.schema import json_schema
from modelyard.config.settings import Config

__all__ = [
    "CacheRow",
    "Config",
    "ConfigError",
    "Description",
    "Loaded",
    "ModelRow",
    "ConfigProblem",
    "RouteRow",
    "describe",
    "engine_options",
    "engine_spec",
    "json_schema",
    "load",
]
