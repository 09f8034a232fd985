"""Training: the paper's experimental protocol as one loop for all methods.

``Config`` says what is trained (a recipe, and what is changed in it), ``Run`` trains it in a folder, and can go on
where it stopped.

>>> config = Config.from_recipe("digits/digitsnet/binary/md-tanh-s", ["iterations=20", "seed=3"])
>>> config.method, config.iterations, config.overrides
('md-tanh-s', 20, {'iterations': 20, 'seed': 3})
"""

from mirrorquant.train.config import Config, ConfigError
from mirrorquant.train.loop import Run, RunError

__all__ = ["Config", "ConfigError", "Run", "RunError"]
