"""Options: what a command and the function behind it can be told, each defined once and checked when it is set."""

from vtk.options.config import Config, Option, expect, groups_of, option_of, require, type_of

__all__ = ["Config", "Option", "expect", "groups_of", "option_of", "require", "type_of"]
