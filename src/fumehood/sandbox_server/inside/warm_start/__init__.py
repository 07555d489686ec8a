"""Loads libraries before the fork and lets forks share their memory.

The figures here say how many times as much a sandbox takes without an optimisation (`make bench-warm-start`, decision
0059). They were taken on a busy machine, where rounds scatter by about 0.1: below 1.1 they only say that it is little.
Outside of this package there are two more: the init program (jail_spawner.py), and a start path without enums and file
objects, whose pages a new sandbox would copy (jail_builder.py, syscalls.py, code_runner.py, output_capture.py). The
latter earns a few percent at most and stays because the plain way, `signal` and `open`, is no shorter.
"""
