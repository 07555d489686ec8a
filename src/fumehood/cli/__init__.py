"""The command line: one module per command, assembled in `main_command`."""

from fumehood.cli.main_command import app as app
from fumehood.cli.main_command import main as main
