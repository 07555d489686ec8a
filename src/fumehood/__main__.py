"""Makes `python -m fumehood` the same as `fumehood`; imports only the command line."""

from fumehood.cli import main

if __name__ == "__main__":
    main()
