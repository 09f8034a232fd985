"""Training: the paper's experimental protocol as one loop for all methods.

``Config`` describes a run (a recipe and its overrides), ``Run`` trains it in a folder and can continue after a stop,
and ``RunFolder`` reads the folder.

>>> config = Config.from_recipe("digits/digitsnet/binary/md-tanh-s", ["iterations=20", "seed=3"])
>>> config.method, config.iterations, config.overrides
('md-tanh-s', 20, {'iterations': 20, 'seed': 3})
"""

from mirrorquant.train.checkpoint import CheckpointError
from mirrorquant.train.config import Config, ConfigError
from mirrorquant.train.engine import EngineError
from mirrorquant.train.loop import Interrupted, Run
from mirrorquant.train.metrics import MetricsError
from mirrorquant.train.objective import Batch, Objective
from mirrorquant.train.run_folder import Best, RunError, RunFolder

__all__ = [
    "Batch",
    "Best",
    "CheckpointError",
    "Config",
    "ConfigError",
    "EngineError",
    "Interrupted",
    "MetricsError",
    "Objective",
    "Run",
    "RunError",
    "RunFolder",
]
