"""The command line, a module for each command; imports siblings."""

from fumehood.cli.commands import app as app
from fumehood.cli.commands import main as main
