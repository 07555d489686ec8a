"""Loads libraries before the fork and lets forks share their memory.

The figures here say how many times as much a sandbox takes without an optimisation (`make bench-warm-start`, decision
0059). They were taken on a busy machine, where rounds scatter by about 0.1: below 1.1 they only say that it is little.
Outside of this package there are two more: the init program (jail_spawner.py), and a start path without JSON,
enums and file objects, whose pages a new sandbox would copy (jail_builder.py, syscalls.py, seccomp_installer.py,
interpreter.py, code_runner.py). Without that one a sandbox takes 1.02 to 1.10 times the CPU time; the plain way there
is `json`, `signal` and `open`.
"""
