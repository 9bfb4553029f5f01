"""Options of commands and of the functions behind them: each is defined once and checked when it is set."""

from vtk.options.config import Config, expect, groups_of, option_of, require, type_of
from vtk.options.option import Option

__all__ = ["Config", "Option", "expect", "groups_of", "option_of", "require", "type_of"]
