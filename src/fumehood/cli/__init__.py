"""The command line, a module for each command."""

from fumehood.cli.main_command import app as app
from fumehood.cli.main_command import main as main
